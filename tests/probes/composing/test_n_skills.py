"""The n_skills probe and its task: what is composed is the prompt, and what is counted is what was run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worded_models import aligned, effects_of, measured, plain_logits, worded

from kvprobe.edit.meter import Meter
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.probes.composing.n_skills.probe import ARMS, NSkills, alone, composed_skills, order_of
from kvprobe.probes.kit.fidelity import ChunkStore
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, PromptPair
from kvprobe.tasks.skills import Skills, separator_name, skill_name


def pairs_of(size: int, **parameters: object) -> list[Pair]:
    return aligned(Skills(size=size, **parameters))  # type: ignore[arg-type]


def texts(pair: PromptPair) -> dict[str, str]:
    return {segment.name: segment.text for segment in pair.base.segments}


@given(seed=st.integers(0, 999))
def test_a_prompt_has_its_skills_and_one_of_them_is_about_the_field(seed: int) -> None:
    pairs = list(Skills(size=8, seed=seed).prompt_pairs())
    smaller: set[str] = set()
    for number, pair in enumerate(pairs):
        said, about = texts(pair), pair.scenario.attributes
        count, place = (1, 2, 4, 8)[number % 4], int(about["place"])
        skills = {name: said[name] for name in map(skill_name, range(count))}
        assert sorted(name for name in said if name.startswith("skill_")) == sorted(skills)
        assert sum(name.startswith("separator_") for name in said) == count - 1
        assert list(said).index("field") > list(said).index(skill_name(count - 1))
        own = skills.pop(skill_name(place))
        for value, action in zip((about["old"], about["new"]), (pair.base_answer, pair.donor_answer), strict=True):
            assert any(value in line and action in line for line in own.split("\n"))
        for other in skills.values():
            words = set(other.replace(".", " ").replace(",", " ").split())
            assert words.isdisjoint({about["old"], about["new"], pair.base_answer, pair.donor_answer, about["field"]})
        if count > 1:
            assert smaller <= set(skills.values())
        smaller = set(skills.values())


def test_the_deciding_place_moves_on_and_prompts_do_not_depend_on_the_size() -> None:
    few, many = list(Skills(size=12).prompt_pairs()), list(Skills(size=36).prompt_pairs())
    assert few == many[:12]
    places = [int(pair.scenario.attributes["place"]) for pair in many if pair.scenario.attributes["skills"] == "8"]
    assert places == [0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_order_and_the_prompt_with_one_skill() -> None:
    single, double, *_ = pairs_of(8)[4:]
    order = order_of(double)
    assert (order.skills, order.asked, order.place) == (("skill_0", "skill_1"), "skill_1", "last")
    # The same scenario with its skill alone is the prompt with one skill.
    assert alone(double.base, order) == single.base.token_ids
    assert alone(double.donor, order) == single.donor.token_ids
    with pytest.raises(ConfigError, match="skills"):
        order_of(aligned(GatedDecision(size=1))[0])
    late = replace(double, field=replace(double.field, start=1, end=2))
    with pytest.raises(ConfigError, match="before the field"):
        order_of(late)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_composed_caches_hold_the_prompt_and_receipts_what_was_run(family: str) -> None:
    subject, pair = worded(family), pairs_of(3)[2]
    order, chunks, (_, neutral, removed) = order_of(pair), ChunkStore(subject), ARMS
    composed_skills(subject, pair.base, order, neutral, chunks)  # compiles, which is not counted
    with Meter(subject) as meter:
        cache, receipt = composed_skills(subject, pair.base, order, neutral, chunks)
    assert receipt.tokens_appended == meter.tokens
    assert cache.positions.tolist() == list(range(order.end))
    skills = sum(len(pair.base.spans[name]) for name in order.skills)
    assert receipt.tokens_appended == order.end - skills
    for name in order.skills:
        span = pair.base.spans[name]
        chunk = chunks.chunk(pair.base.token_ids[span.start : span.end], "neutral")
        for ours, theirs in zip(cache.layers, chunk.cache.layers, strict=True):
            assert torch.equal(ours.values[:, :, span.start : span.end], theirs.values)
    without, _ = composed_skills(subject, pair.base, order, removed, chunks)
    assert len(without) == order.end - len(pair.base.spans[order.asked])
    between = pair.base.spans[separator_name(0)]
    assert any(
        not torch.equal(
            ours.values[:, :, between.start : between.end], theirs.values[:, :, between.start : between.end]
        )
        for ours, theirs in zip(cache.layers, prefill(subject, pair.base.token_ids).cache.layers, strict=True)
    )


def test_rows_and_effects() -> None:
    subject, pairs = worded("qwen3"), pairs_of(12)
    probe = NSkills(able=0.0)
    rows = measured(probe, subject, pairs)
    assert len(rows) == 12 * 2 * len(ARMS)
    for index, pair in enumerate(pairs[:4]):
        here = rows[rows["pair"] == index]
        answers = pair.base_answer_id, pair.donor_answer_id
        expected = [
            read(plain_logits(subject.model, prompt.token_ids), *answers).margin for prompt in (pair.base, pair.donor)
        ]
        found = here.groupby("prompt")["reference_margin"].first()
        assert found["base"] == pytest.approx(-expected[0], abs=1e-6)
        assert found["donor"] == pytest.approx(expected[1], abs=1e-6)
        # The gate reads the scenario with its skill alone, whatever the number of skills.
        assert here["m_base"].nunique() == 1
        assert here["m_base"].iloc[0] == rows.loc[rows["pair"] == 0, "m_base"].iloc[0]
    assert rows["m_base"].nunique() == 3
    assert (rows["noise_floor"] < 1e-6).all()
    effects = effects_of(probe, rows)
    shares = [effects[f"splice_none_{count}.token_share"].estimate for count in (1, 2, 4, 8)]
    assert 1 > shares[0] > shares[1] > shares[2] > shares[3]
    assert effects["removed_8.flop_share"].estimate <= effects["splice_neutral_8.flop_share"].estimate
    assert {"first_1.splice_none.agreement", "first_8.removed.agreement", "splice_none.most_less_fewest.kl"} <= {
        *effects
    }


def test_an_able_prefill_is_asked_for_at_each_number_of_skills() -> None:
    subject, pairs = worded("llama"), pairs_of(8)
    rows = measured(NSkills(), subject, pairs)
    rows.loc[rows["skills"] <= 2, "reference_margin"] = 1.0
    rows.loc[rows["skills"] > 2, "reference_margin"] = -1.0
    names = set(effects_of(NSkills(), rows))
    assert {f"full_prefill_{count}.accuracy" for count in (1, 2, 4, 8)} <= names
    assert "splice_none_2.agreement" in names
    assert not any("splice_none_4" in name or "_8." in name for name in names - {"full_prefill_8.accuracy"})


def test_a_skill_spliced_in_its_place_is_the_prefill() -> None:
    """With one skill and nothing in front of it, compiled from behind nothing, there is nothing left to differ."""
    subject, pair = worded("llama"), pairs_of(1)[0]
    spans = pair.base.spans
    start = spans["skill_0"].start
    cut = replace(
        pair.base,
        token_ids=pair.base.token_ids[start:],
        spans={
            name: replace(span, start=span.start - start, end=span.end - start)
            for name, span in spans.items()
            if span.start >= start
        },
    )
    donor = replace(cut, token_ids=pair.donor.token_ids[start:])
    field = cut.spans["field"]
    moved = replace(pair, base=cut, donor=donor, field=field)
    order = order_of(moved)
    cache, _ = composed_skills(subject, moved.base, order, ARMS[0], ChunkStore(subject))
    found = forward(subject, cut.token_ids[order.end :], cache).logits
    torch.testing.assert_close(found, prefill(subject, cut.token_ids).logits, atol=1e-9, rtol=0)
