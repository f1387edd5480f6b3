"""Edits: everything is built from the stale cache, nothing else is touched, and what is declared is what is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, VOCABULARY, tiny, tokens

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.erratum import erratum_name
from kvprobe.edit.meter import Meter
from kvprobe.edit.selective import recompute_selected
from kvprobe.engine.forward import prefill
from kvprobe.errors import UnsupportedError
from kvprobe.models.subject import Subject
from kvprobe.tasks.context import Span

IDS = tokens(20)
SPANS = {
    "session": Span(1, 4),
    "field": Span(4, 6),
    "rest": Span(6, 8),
    "policy": Span(8, 15),
    "task": Span(15, 18),
    "cue": Span(18, 20),
}
LINE = (tuple(IDS[2:4]), tuple(IDS[6:7]))
NEW, LONGER, SHORTER, SAME = (33, 34), (33, 34, 35, 36), (33,), tuple(IDS[4:6])
ERRATUM = (40, 41, 42, 43)
NOISE = 3e-5
# In float64; eager attention, which Gemma-2 needs, takes its softmax in float32 all the same.
EXACT = 5e-6
# Attention of the decision is read through a bridge that not every tiny architecture has, and is tested on organisms.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stale": ("stale", {}),
    "field_only": ("field_only", {}),
    "selective_suffix": ("selective", {"k": 4, "criterion": "suffix"}),
    "selective_random": ("selective", {"k": 4, "criterion": "random"}),
    "selective_deviation": ("selective", {"k": 4, "criterion": "first_layer_deviation"}),
    "cacheblend": ("cacheblend", {"share": 0.3}),
    "full_downstream": ("full_downstream", {}),
    "full_reprefill": ("full_reprefill", {}),
    "hoist_to_end": ("hoist_to_end", {}),
    "erratum": ("erratum", {}),
    "field_and_erratum": ("field_and_erratum", {}),
}
IN_PLACE = [name for name in VARIANTS if "erratum" not in name and name != "hoist_to_end"]


def method(variant: str, **more: Any) -> EditMethod:
    name, parameters = VARIANTS[variant]
    kind = EDIT_METHODS.get(name)
    return kind(kind.Parameters(**{**parameters, **more}))


def stale(subject: Subject) -> CachedPrompt:
    return CachedPrompt.prefilled(subject, IDS, SPANS)


def edit(new: tuple[int, ...]) -> FieldEdit:
    return FieldEdit("field", new, ERRATUM, LINE)


def logits(subject: Subject, edited: Edited) -> torch.Tensor:
    return edited.prompt.decide(subject).logits


def test_every_method_has_a_variant_here_but_the_upper_bounds() -> None:
    tested = {name for name, _ in VARIANTS.values()}
    assert {name for name in EDIT_METHODS.names() if not EDIT_METHODS.get(name).upper_bound} == tested


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_untouched_entries_are_bit_identical_to_the_stale_cache(name: str, variant: str) -> None:
    subject, prompt = tiny(name), stale(tiny(name))
    before = prompt.cache.fingerprint()
    for new in (NEW, LONGER, SHORTER):
        edited = method(variant).apply(subject, prompt, edit(new))
        computed, after = set(edited.computed), edited.prompt
        assert prompt.cache.fingerprint() == before
        for position, source in enumerate(after.cache.source_positions.tolist()):
            if position in computed:
                assert source == position
                continue
            assert after.token_ids[position] == prompt.token_ids[source]
            for mine, theirs in zip(after.cache.layers, prompt.cache.layers, strict=True):
                assert torch.equal(mine.source_keys[:, :, position], theirs.keys[:, :, source])
                assert torch.equal(mine.values[:, :, position], theirs.values[:, :, source])
                if source == position:
                    assert torch.equal(mine.keys[:, :, position], theirs.keys[:, :, position])
        for segment, span in after.spans.items():
            if segment in {"policy", "task", "cue"}:
                old = SPANS[segment]
                assert after.token_ids[span.start : span.end] == tuple(IDS[old.start : old.end])
        if variant != "stale":
            where = after.spans["field" if "erratum" not in variant else erratum_name("field")]
            assert after.token_ids[where.start : where.end] == (new if "erratum" not in variant else ERRATUM)


@pytest.mark.parametrize("variant", IN_PLACE)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_edit_to_the_same_value_changes_nothing(name: str, variant: str) -> None:
    subject, prompt = tiny(name), stale(tiny(name))
    edited = method(variant).apply(subject, prompt, edit(SAME))
    torch.testing.assert_close(logits(subject, edited), prefill(subject, IDS).logits, atol=NOISE, rtol=0)


@pytest.mark.parametrize("variant", ["full_downstream", "full_reprefill", "selective_suffix", "cacheblend"])
@pytest.mark.parametrize("new", [NEW, LONGER, SHORTER])
@pytest.mark.parametrize("name", FAMILIES)
def test_recomputing_all_that_follows_is_the_oracle(name: str, variant: str, new: tuple[int, ...]) -> None:
    subject = tiny(name, torch.float64)
    everything = {"selective_suffix": {"k": 99}, "cacheblend": {"share": 1.0}}.get(variant, {})
    edited = method(variant, **everything).apply(subject, stale(subject), edit(new))
    oracle = prefill(subject, [*IDS[:4], *new, *IDS[6:]])
    torch.testing.assert_close(logits(subject, edited), oracle.logits, atol=EXACT, rtol=0)
    for mine, theirs in zip(edited.prompt.cache.layers, oracle.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys[:, :, :-1], atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_erratum_equals_a_prefill_that_has_the_line_and_hoisting_one_that_has_the_field_last(name: str) -> None:
    subject = tiny(name, torch.float64)
    prompts = {
        "erratum": [*IDS[:15], *ERRATUM, *IDS[15:]],
        "hoist_to_end": [*IDS[:2], *IDS[7:18], *LINE[0], *LONGER, *LINE[1], *IDS[18:]],
    }
    for variant, ids in prompts.items():
        edited = method(variant).apply(subject, stale(subject), edit(LONGER))
        assert list(edited.prompt.token_ids) == ids
        torch.testing.assert_close(logits(subject, edited), prefill(subject, ids).logits, atol=EXACT, rtol=0)


def test_a_second_erratum_takes_the_place_of_the_first() -> None:
    subject = tiny("qwen3", torch.float64)
    first = method("erratum").apply(subject, stale(subject), edit(NEW)).prompt
    again = FieldEdit("field", SAME, (44, 45), LINE)
    second = method("erratum").apply(subject, first, again)
    assert list(second.prompt.token_ids) == [*IDS[:15], 44, 45, *IDS[15:]]
    other = FieldEdit("rest", (50, 51), (46,), None)
    third = method("erratum").apply(subject, second.prompt, other).prompt
    assert list(third.token_ids) == [*IDS[:15], 44, 45, 46, *IDS[15:]]
    fourth = method("field_and_erratum").apply(subject, third, edit(LONGER)).prompt
    assert list(fourth.token_ids) == [*IDS[:4], *LONGER, *IDS[6:15], 46, *ERRATUM, *IDS[15:]]
    assert fourth.spans[erratum_name("rest")] == Span(17, 18)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_declared_tokens_are_those_the_model_runs(name: str, variant: str) -> None:
    subject = tiny(name)
    prompt = stale(subject)
    for new in (NEW, LONGER):
        with Meter(subject) as meter:
            edited = method(variant).apply(subject, prompt, edit(new))
        assert meter.tokens == pytest.approx(method(variant).tokens(prompt, edit(new)))
        receipt = edited.receipt
        assert receipt.tokens_appended + receipt.tokens_recomputed == pytest.approx(meter.tokens, abs=1)
        with Meter(subject) as meter:
            edited.prompt.decide(subject)
        assert (meter.calls, meter.tokens) == (1, 1)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "stale"])
def test_receipts_count_the_flops_that_torch_counts(variant: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    subject = tiny("qwen3", attention="eager")
    prompt = stale(subject)
    with FlopCounterMode(display=False) as counter:
        edited = method(variant).apply(subject, prompt, edit(NEW))
    # torch multiplies masked scores too and the engine does not count them.
    masked = counter.get_total_flops() - edited.receipt.flops
    assert 0 <= masked < 0.25 * counter.get_total_flops()


@pytest.mark.parametrize("name", FAMILIES)
@given(chosen=st.sets(st.integers(6, 17), min_size=1, max_size=6))
def test_a_selective_edit_equals_one_masked_forward_of_plain_hugging_face(name: str, chosen: set[int]) -> None:
    subject = tiny(name, torch.float64, "eager")
    edited = recompute_selected(subject, stale(subject), edit(NEW), sorted(chosen))
    got = logits(subject, edited)
    torch.testing.assert_close(got, _one_forward(subject, sorted({4, 5, *chosen})), atol=EXACT, rtol=0)


def _one_forward(subject: Subject, fresh: list[int]) -> torch.Tensor:
    """Old tokens, then the fresh ones at their positions, then the decision, which sees fresh before old."""
    new = dict(zip((4, 5), NEW, strict=True))
    positions = torch.tensor([*range(19), *fresh, 19])
    ids = torch.tensor([*IDS[:19], *(new.get(place, IDS[place]) for place in fresh), IDS[19]])
    renewed = torch.tensor([*(place in fresh for place in range(19)), *[False] * (len(fresh) + 1)])
    old_query = torch.arange(len(ids)) < 19
    causal = positions[:, None] >= positions[None, :]
    order = torch.where(old_query[:, None], old_query[None, :], ~renewed[None, :])
    allowed = causal & order
    masks = {}
    for kind in dict.fromkeys(subject.architecture.layer_types(subject.config)):
        window = subject.config.sliding_window if kind == "sliding_attention" else 10**6
        near = positions[:, None] - positions[None, :] < window
        masks[kind] = torch.where(allowed & near, 0.0, torch.finfo(torch.float32).min).double()[None, None]
    mask = masks if subject.architecture.masks_by_layer_type else next(iter(masks.values()))
    with torch.no_grad():
        output = subject.model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False)
    return output.logits[0, -1]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_a_longer_value_is_rotated_to_where_a_prefill_would_have_it(name: str) -> None:
    subject = tiny(name, torch.float64)
    edited = method("field_only").apply(subject, stale(subject), edit(LONGER))
    native = prefill(subject, [*IDS[:4], *LONGER, *IDS[6:]]).cache
    # Keys of the first layer know their own token and position alone.
    torch.testing.assert_close(
        edited.prompt.cache.layers[0].keys, native.layers[0].keys[:, :, :-1], atol=EXACT, rtol=EXACT
    )


def test_edits_that_cannot_be_made_are_refused() -> None:
    subject = tiny("llama")
    prompt = stale(subject)
    with pytest.raises(UnsupportedError, match="empty"):
        method("field_only").apply(subject, prompt, FieldEdit("field", ()))
    with pytest.raises(UnsupportedError, match="no line"):
        method("erratum").apply(subject, prompt, FieldEdit("field", NEW))
    with pytest.raises(UnsupportedError, match="needs its line"):
        method("hoist_to_end").apply(subject, prompt, FieldEdit("field", NEW, ERRATUM))
    with pytest.raises(UnsupportedError, match="as it was declared"):
        method("hoist_to_end").apply(subject, prompt, FieldEdit("field", NEW, ERRATUM, ((1,), (2,))))
    with pytest.raises(UnsupportedError, match="leave out the last"):
        CachedPrompt(tuple(IDS), SPANS, prefill(subject, IDS).cache)
    assert max(ERRATUM) < VOCABULARY


def test_a_line_is_hoisted_forward_only() -> None:
    subject = tiny("llama")
    for before in ("session", "field", "rest"):
        with pytest.raises(UnsupportedError, match="cannot be hoisted"):
            method("hoist_to_end", before=before).apply(subject, stale(subject), edit(NEW))
    assert (
        method("hoist_to_end", before="task").apply(subject, stale(subject), edit(NEW)).prompt.spans["field"].end < 20
    )
