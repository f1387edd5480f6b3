"""Laws of causal scrubbing and of the scrub probe, and one number against plain Hugging Face."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import DynamicCache
from worded_models import aligned, effects_of, measured, plain_margin, worded
from worded_models import margin_of as decided

from kvprobe.engine.forward import prefill
from kvprobe.engine.operations import reposition
from kvprobe.errors import SampleError
from kvprobe.models.subject import Subject
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.mechanism.scrub.hypotheses import hypotheses
from kvprobe.probes.mechanism.scrub.probe import Scrub
from kvprobe.probes.mechanism.scrub.scrubbing import DonorSampler, Node, Prompt, conclusion, moved, nothing, scrub
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.shared_actions import SharedActions

TASK = SharedActions(size=18, actions=(("approve", "reject"),))


def population(subject: Subject, pairs: list[Pair]) -> list[Prompt]:
    ways = [way for pair in pairs for way in (pair, pair.reversed())]
    return [Prompt(way, prefill(subject, way.base.token_ids).cache) for way in ways]


@cache
def many() -> list[Prompt]:
    return population(worded(dtype=torch.float32), aligned(TASK))


def sampler(prompts: list[Prompt], wordings: Any = "same", minimum: int = 1, seed: int = 0) -> DonorSampler:
    return DonorSampler(prompts, wordings, minimum, np.random.Generator(np.random.PCG64(seed)))


def margin_of(subject: Subject, prompt: Prompt, patches: Any) -> float:
    pair = prompt.pair
    return patched_margins(subject, pair, pair.base, prompt.cache, [patches])[0]


def renamed(prompt: Prompt, skeleton: str) -> Prompt:
    """The same prompt under the name of another skeleton."""
    pair = prompt.pair
    return Prompt(replace(pair, scenario=replace(pair.scenario, skeleton=skeleton)), prompt.cache)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_entries_moved_together_are_repositioned(family: str) -> None:
    subject = worded(family, torch.float32)
    cache = prefill(subject, list(range(5, 25))).cache
    places = [3, 7, 8]
    together, _ = reposition(subject, cache.take(cache.index_of(places)), 4)
    ours = moved(subject, cache, places, [7, 11, 12])
    assert ours.fingerprint() == together.fingerprint()
    assert moved(subject, cache, places, places).fingerprint() == cache.take(cache.index_of(places)).fingerprint()


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_donor_that_is_the_prompt_itself_changes_nothing(family: str) -> None:
    subject, (pair,) = worded(family, torch.float32), aligned(SharedActions(size=1))
    (prompt, _) = population(subject, [pair])
    order = list(pair.downstream.positions)
    unedited = margin_of(subject, prompt, ())
    for arm, nodes in hypotheses(pair, order, 6).items():
        if arm in ("note_opposite", "rest_opposite"):
            continue
        scrubbed = scrub(subject, prompt, nodes, sampler([renamed(prompt, name) for name in ("here", "there")]))
        assert scrubbed.coverage == 1.0
        assert margin_of(subject, prompt, scrubbed.patches) == pytest.approx(unedited, abs=1e-4)


def test_donors_match_the_variable_and_differ_in_all_else() -> None:
    prompts = many()
    everything = Node("everything", lambda prompt: prompt.pair.downstream.positions, conclusion)
    for wordings in ("same", "other"):
        draws = sampler(prompts, wordings)
        for prompt in prompts[:6]:
            same = draws.candidates(prompt, everything)
            opposite = draws.candidates(prompt, replace(everything, opposite=True))
            any_donor = draws.candidates(prompt, replace(everything, variable=nothing))
            assert {donor.conclusion for donor in same} == {prompt.conclusion}
            assert {donor.conclusion for donor in opposite} == prompt.answers - {prompt.conclusion}
            assert {id(donor) for donor in any_donor} == {id(donor) for donor in same + opposite}
            for donor in any_donor:
                assert donor.pair.scenario.skeleton != prompt.pair.scenario.skeleton
                assert (donor.pair.scenario.wording == prompt.pair.scenario.wording) == (wordings == "same")


def test_each_node_and_each_draw_has_a_donor_of_its_own() -> None:
    prompts = many()
    node = Node("note", lambda prompt: prompt.pair.downstream.positions, conclusion)
    draws = sampler(prompts)
    assert len({id(draws.draw(prompts[0], node)) for _ in range(30)}) > 3


def test_entries_without_counterpart_stay_and_coverage_says_so() -> None:
    subject, prompts = worded(dtype=torch.float32), many()
    prompt, donor = (
        prompts[0],
        next(one for one in prompts if one.pair.scenario.wording != prompts[0].pair.scenario.wording),
    )
    here, _ = prompt.matched(range(prompt.pair.decision_position), donor)
    alone = sorted(set(range(prompt.pair.decision_position)) - set(here))[:3]
    assert len(alone) == 3
    for places, coverage in ((alone, 0.0), ([*alone, here[-1]], 0.25)):
        node = Node("note", lambda _, places=places: places, nothing)
        scrubbed = scrub(subject, prompt, [node], sampler([donor], "other"))
        assert scrubbed.coverage == coverage
        assert [patch.positions for patch in scrubbed.patches] == ([(here[-1],)] if coverage else [])


def test_too_few_donors_are_refused() -> None:
    prompts = many()
    node = Node("note", lambda prompt: prompt.pair.downstream.positions, conclusion)
    with pytest.raises(SampleError, match=r"Only \d skeletons .* 'note' and 20 are asked for"):
        sampler(prompts, minimum=20).draw(prompts[0], node)


def test_slots_name_the_same_place_in_prompts_of_other_scenarios_and_wordings() -> None:
    prompts = many()
    one = prompts[0]
    spans = one.pair.base.spans["policy"]
    actions = [p for p in spans.positions if one.pair.base.token_ids[p] in one.answers]
    assert len(actions) == 2
    for other in prompts[2:]:
        here, there = one.matched(actions, other)
        assert [one.pair.base.token_ids[p] for p in here] == [other.pair.base.token_ids[p] for p in there]
        assert {other.pair.base.segment_of(p) for p in there} == {"policy"}


def test_what_a_node_reads_is_scrubbed_before_it_is_recomputed() -> None:
    subject, prompts = worded(dtype=torch.float32), many()
    prompt = prompts[0]
    places = sorted(prompt.pair.base.spans["policy"].positions)[-6:]
    prefix = Node("prefix", lambda one: range(one.pair.field.start), nothing)
    plain = Node("note", lambda _: places, conclusion)
    first = scrub(subject, prompt, [plain], sampler(prompts, seed=3)).patches[0]
    again = scrub(subject, prompt, [replace(plain, reads=(prefix,))], sampler(prompts, seed=3)).patches[0]
    # The first draw is the note's donor, the same in both.
    assert first.positions == again.positions
    assert torch.equal(first.donor.source_positions, again.donor.source_positions)
    assert torch.allclose(first.donor.layers[0].values, again.donor.layers[0].values, atol=1e-6)
    assert not torch.allclose(first.donor.layers[-1].values, again.donor.layers[-1].values, atol=1e-4)


def rotated(keys: torch.Tensor, turn: torch.Tensor, theta: float) -> torch.Tensor:
    """Keys `[head, position, channel]` turned by `turn` positions, written out from the definition of RoPE."""
    half = keys.shape[-1] // 2
    angle = turn[:, None].double() / theta ** (torch.arange(half).double() / half)
    first, second = keys[..., :half], keys[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def test_a_note_from_a_longer_prompt_agrees_with_the_plain_script_in_float64() -> None:
    subject = worded()
    prompts = population(subject, aligned(TASK))
    prompt = prompts[0]
    places = sorted(prompt.pair.base.spans["policy"].positions)[3:9]
    node = Node("note", lambda _: places, conclusion)
    donor = next(one for one in sampler(prompts).candidates(prompt, node) if len(one.cache) != len(prompt.cache))
    scrubbed = scrub(subject, prompt, [node], sampler([donor]))
    here, there = prompt.matched(places, donor)
    turn = torch.tensor(here) - torch.tensor(there)
    assert turn.any()

    model, caches = subject.model, []
    with torch.no_grad():
        for one in (prompt, donor):
            past = DynamicCache()
            model(torch.tensor([one.pair.base.token_ids[:-1]]), past_key_values=past, use_cache=True)
            caches.append(past)
        theta = model.config.rope_parameters["rope_theta"]
        for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
            mine.keys[0, :, here] = rotated(other.keys[0, :, there], turn, theta)
            mine.values[0, :, here] = other.values[0, :, there]
        last = torch.tensor([[prompt.pair.base.token_ids[-1]]])
        logits = model(last, past_key_values=caches[0], use_cache=True).logits[0, -1]
    expected = decided(prompt.pair, logits)
    # The engine rounds RoPE's frequencies to float32, as the model does.
    assert margin_of(subject, prompt, scrubbed.patches) == pytest.approx(expected, abs=1e-5)
    unedited = plain_margin(subject, prompt.pair, [])
    assert abs(expected - unedited) > 1e-3


def test_a_model_at_chance_gives_no_scrubs_but_rows_for_the_gate() -> None:
    rows = measured(Scrub(folds=2), worded(), aligned(SharedActions(size=3)))
    assert set(rows["measurement"]) == {"unedited"}
    assert list(rows["pair"]) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(SampleError, match="No prompt was scrubbed"):
        effects_of(Scrub(), rows)


def test_prompts_without_enough_donors_are_left_out_and_counted() -> None:
    rows = []
    for pair in range(10):
        for direction in ("old_to_new", "new_to_old"):
            common = {"pair": pair, "skeleton": f"s{pair}", "direction": direction}
            common |= {"m_base": -5.0, "m_donor": 5.0, "noise_floor": 1e-6}
            rows.append({**common, "measurement": "unedited", "donors": pair})
            if pair < 3:
                continue
            for arm, margin in (("note_same", -6.0), ("note_same", -4.0), ("hypothesis", -4.0), ("anything", 0.0)):
                decision = {"measurement": "decision", "intervention": arm, "margin": margin, "flipped": False}
                rows.append({**common, **decision, "coverage": 0.5})
    effects = effects_of(Scrub(), pd.DataFrame(rows))
    assert effects["note_same.drift"].estimate == pytest.approx(0.1)
    assert effects["note_same.recovery"].estimate == pytest.approx(0.0)
    assert effects["hypothesis.explained"].estimate == pytest.approx(0.8)
    assert effects["note_same.coverage"].estimate == 0.5
    assert {effect.excluded for name, effect in effects.items() if name != "noise.margin"} == {6}
