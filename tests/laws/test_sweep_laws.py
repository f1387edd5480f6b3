"""Sweeps: patches equal the algebra, batches change nothing, knockouts keep soft-capping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CONFIGS, FAMILIES, VOCABULARY, WINDOW, WINDOWED, build, rounds_to_float32, tiny, tokens

from kvprobe.engine import shared_prefix, sweep
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.interventions import AttentionKnockout, KVPatch
from kvprobe.engine.operations import overwrite, slice_cache
from kvprobe.engine.planner import plan_batch
from kvprobe.engine.readout import cosine, read, read_rows
from kvprobe.engine.sweep import decide, run_patches
from kvprobe.errors import NoEffectError, OutOfMemoryError, UnsupportedError

LENGTH = 16
FIELD = 9
DECISION = LENGTH - 1
NOISE = 2e-5


class Pair:
    """A base and a donor that differ in one token."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, attention: str | None = None) -> None:
        self.subject = tiny(name, dtype, attention)
        self.ids = tokens(LENGTH)
        self.donor_ids = list(self.ids)
        self.donor_ids[FIELD] = 3 + (self.ids[FIELD] - 2) % 50
        self.base, self.donor = prefill(self.subject, self.ids), prefill(self.subject, self.donor_ids)

    def run(self, rows: Any, **options: Any) -> torch.Tensor:
        return run_patches(self.subject, self.ids, self.base.cache, rows, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_the_base_and_everything_is_the_oracle(name: str) -> None:
    pair = Pair(name)
    whole, downstream = tuple(range(DECISION)), tuple(range(FIELD, DECISION))
    rows = [(), KVPatch(whole, pair.donor.cache), KVPatch(downstream, pair.donor.cache)]
    logits = pair.run(rows)
    torch.testing.assert_close(logits[0], pair.base.logits, atol=NOISE, rtol=0)
    torch.testing.assert_close(logits[1], pair.donor.logits, atol=NOISE, rtol=0)
    torch.testing.assert_close(logits[1], logits[2], atol=NOISE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_a_patched_row_equals_overwrite_then_forward(name: str, data: st.DataObject) -> None:
    pair = Pair(name, torch.float64)
    places = data.draw(st.sets(st.integers(0, DECISION - 1), min_size=1))
    layers = data.draw(st.one_of(st.none(), st.sets(st.integers(0, pair.subject.layers - 1), min_size=1)))
    chosen = None if layers is None else tuple(sorted(layers))
    patch = KVPatch(tuple(sorted(places)), pair.donor.cache, chosen, no_op=True)
    before = slice_cache(pair.base.cache, range(DECISION))[0]
    patched, _ = overwrite(before, sorted(places), pair.donor.cache, chosen, no_op=True)
    alone = forward(pair.subject, pair.ids[-1:], patched).logits
    torch.testing.assert_close(pair.run([patch], reference=True)[0], alone, atol=1e-12, rtol=0)
    exact = 1e-5 if rounds_to_float32(name) else 1e-12
    torch.testing.assert_close(pair.run([patch])[0], alone, atol=exact, rtol=0)


@st.composite
def _row(draw: st.DrawFn, donors: list[KVCache], layers: int) -> tuple[KVPatch | AttentionKnockout, ...]:
    """Patches of several donors one over the other, and knockouts, in any layers."""
    places = st.sets(st.integers(0, DECISION - 1), max_size=DECISION).map(lambda chosen: tuple(sorted(chosen)))
    chosen = st.one_of(st.none(), st.sets(st.integers(0, layers - 1)).map(tuple))
    patch = st.builds(KVPatch, places, st.sampled_from(donors), chosen, st.just(True))
    knockout = st.builds(AttentionKnockout, st.just((DECISION,)), places, chosen, st.just(True))
    return tuple(draw(st.lists(st.one_of(patch, patch, knockout), max_size=4)))


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_rows_on_one_shared_cache_equal_rows_laid_out_whole(name: str, data: st.DataObject) -> None:
    pair = Pair(name, torch.float64)
    third = prefill(pair.subject, tokens(LENGTH, seed=3)).cache
    donors = [pair.donor.cache, third, pair.base.cache]
    rows = data.draw(st.lists(_row(donors, pair.subject.layers), min_size=1, max_size=6))
    size = data.draw(st.integers(1, 6))
    exact = 1e-5 if rounds_to_float32(name) else 1e-11
    laid_out = pair.run(rows, reference=True)
    torch.testing.assert_close(pair.run(rows, batch_size=size), laid_out, atol=exact, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_attended_in_parts_equal_rows_attended_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(name, torch.float64)
    rows = [KVPatch((place,), pair.donor.cache) for place in range(FIELD, DECISION)]
    at_once = pair.run(rows)
    monkeypatch.setattr(shared_prefix, "SCORES_AT_ONCE", 1)
    torch.testing.assert_close(pair.run(rows), at_once, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_on_one_shared_cache_are_as_near_to_float64_as_rows_laid_out_whole(name: str, dtype: torch.dtype) -> None:
    def sweep_in(precision: torch.dtype, **options: bool) -> torch.Tensor:
        pair = Pair(name, precision)
        rows = [KVPatch((place,), pair.donor.cache, no_op=True) for place in range(FIELD, DECISION)]
        return pair.run(rows, **options).double()

    exact = sweep_in(torch.float64)
    shared, laid_out = (float((sweep_in(dtype, reference=whole) - exact).norm()) for whole in (False, True))
    assert shared <= 1.5 * laid_out + 1e-6


@pytest.mark.parametrize("name", FAMILIES)
@given(order=st.permutations(range(DECISION - FIELD)), size=st.integers(1, 8))
def test_batch_size_and_order_change_no_result(name: str, order: list[int], size: int) -> None:
    pair = Pair(name)
    rows = [KVPatch((place,), pair.donor.cache) for place in range(FIELD, DECISION)]
    alone = pair.run(rows, batch_size=1)
    shuffled = pair.run([rows[i] for i in order], batch_size=size)
    torch.testing.assert_close(shuffled, alone[list(order)], atol=NOISE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_before_the_field_has_an_effect(name: str) -> None:
    pair = Pair(name)
    prefix = range(FIELD)
    mine, other = (slice_cache(run.cache, prefix)[0] for run in (pair.base, pair.donor))
    if pair.subject.architecture.has_experts:
        # Which experts the field's token is sent to decides how the others' products are grouped, and so rounded.
        for a, b in zip(mine.layers, other.layers, strict=True):
            torch.testing.assert_close(a.keys, b.keys, atol=NOISE, rtol=0)
            torch.testing.assert_close(a.values, b.values, atol=NOISE, rtol=0)
        return
    assert mine.fingerprint() == other.fingerprint()
    assert torch.equal(pair.run([()]), pair.run([KVPatch(tuple(prefix), pair.donor.cache, no_op=True)]))
    with pytest.raises(NoEffectError, match=r"positions 0\.\.8 changes nothing"):
        pair.run([KVPatch(tuple(range(FIELD)), pair.donor.cache)])
    with pytest.raises(NoEffectError, match="changes nothing"):
        pair.run([KVPatch((FIELD + 1,), pair.donor.cache, layers=(0,))])
    with pytest.raises(NoEffectError, match="without positions"):
        KVPatch((), pair.donor.cache)
    with pytest.raises(NoEffectError, match="without queries"):
        AttentionKnockout((1,), ())


@pytest.mark.parametrize("name", WINDOWED)
def test_a_sliding_layer_cannot_read_a_patch_at_exactly_the_window(name: str) -> None:
    """Only the first, sliding layer is patched: distance WINDOW is unseen, distance WINDOW - 1 is seen."""
    pair = Pair(name)
    other = prefill(pair.subject, tokens(LENGTH, seed=3)).cache
    rows = [(), KVPatch((DECISION - WINDOW,), other, (0,)), KVPatch((DECISION - WINDOW + 1,), other, (0,))]
    base, outside, inside = (pair.run([row])[0] for row in rows)
    assert torch.equal(base, outside)
    assert float((base - inside).abs().max()) > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sweep_never_mutates_its_caches(name: str) -> None:
    pair = Pair(name)
    before = (pair.base.cache.fingerprint(), pair.donor.cache.fingerprint())
    pair.run([KVPatch((FIELD,), pair.donor.cache), AttentionKnockout((DECISION,), (DECISION - 1,))])
    assert (pair.base.cache.fingerprint(), pair.donor.cache.fingerprint()) == before


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_equals_the_model_librarys_own(name: str) -> None:
    pair = Pair(name, torch.float64, "eager")
    weights = decide(pair.subject, pair.ids, pair.base.cache, attention=True).attention
    with torch.no_grad():
        plain = pair.subject.model(torch.tensor([pair.ids]), output_attentions=True, use_cache=False).attentions
    assert weights is not None
    assert weights.shape == (pair.subject.layers, 4, LENGTH)
    torch.testing.assert_close(weights, torch.stack([layer[0, :, -1] for layer in plain]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_a_knockout_renormalises_the_very_same_scores(name: str, data: st.DataObject) -> None:
    """In the first changed layer the remaining weights keep their ratios: soft-capping is still there."""
    pair = Pair(name, torch.float64, "eager")
    hidden = data.draw(st.sets(st.integers(DECISION - WINDOW + 1, DECISION - 1), min_size=1))
    first = data.draw(st.integers(0, pair.subject.layers - 1))
    knockout = AttentionKnockout((DECISION,), tuple(sorted(hidden)), tuple(range(first, pair.subject.layers)))
    before = decide(pair.subject, pair.ids, pair.base.cache, attention=True).attention
    after = decide(pair.subject, pair.ids, pair.base.cache, knockout, attention=True).attention
    assert before is not None
    assert after is not None
    assert bool((after[first:, :, sorted(hidden)] == 0).all())
    torch.testing.assert_close(after[:first], before[:first], atol=1e-12, rtol=0)
    rest = before[first].clone()
    rest[:, sorted(hidden)] = 0
    torch.testing.assert_close(after[first], rest / rest.sum(-1, keepdim=True), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_knockout_rows_equal_a_forward_with_the_same_knockout(name: str) -> None:
    pair = Pair(name, torch.float64)
    exact = 1e-5 if rounds_to_float32(name) else 1e-12
    before = slice_cache(pair.base.cache, range(DECISION))[0]
    knockouts = [AttentionKnockout((DECISION,), (DECISION - k,), layers) for k in (1, 2) for layers in (None, (1,))]
    rows = pair.run([*knockouts, (knockouts[0], KVPatch((FIELD,), pair.donor.cache)), ()])
    for row, knockout in zip(rows, knockouts, strict=False):
        alone = forward(pair.subject, pair.ids[-1:], before, knockouts=[knockout]).logits
        torch.testing.assert_close(row, alone, atol=exact, rtol=0)
    both, _ = overwrite(before, [FIELD], pair.donor.cache)
    alone = forward(pair.subject, pair.ids[-1:], both, knockouts=[knockouts[0]]).logits
    torch.testing.assert_close(rows[4], alone, atol=exact, rtol=0)
    torch.testing.assert_close(rows[5], pair.base.logits, atol=exact, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_key_set_changes_no_logit(name: str) -> None:
    pair = Pair(name)
    assert torch.equal(pair.run([()]), pair.run([AttentionKnockout((DECISION,), (), no_op=True)]))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory"),
        MemoryError(),
    ],
)
def test_out_of_memory_halves_the_batch_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    pair = Pair("gemma2")
    rows = [KVPatch((place,), pair.donor.cache) for place in range(FIELD, DECISION)]
    expected = pair.run(rows, batch_size=1)
    real, sizes = sweep.call_model, []

    def small(subject: Any, ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(len(ids))
        if len(ids) > 2:
            raise error
        return real(subject, ids, *args, **options)

    monkeypatch.setattr(sweep, "call_model", small)
    torch.testing.assert_close(pair.run(rows, batch_size=6), expected, atol=NOISE, rtol=0)
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]


def test_not_even_one_row_is_an_error_and_other_errors_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("qwen3")

    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    monkeypatch.setattr(sweep, "call_model", fail)
    failure: Exception = torch.OutOfMemoryError("out of memory")
    with pytest.raises(OutOfMemoryError, match="Not even one row"):
        pair.run([KVPatch((FIELD,), pair.donor.cache)])
    failure = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes"):
        pair.run([KVPatch((FIELD,), pair.donor.cache)])


def test_an_exception_in_a_sweep_leaves_the_model_as_it_was() -> None:
    pair = Pair("gemma2")
    pair.subject = build(CONFIGS["gemma2"], "gemma2")
    knockout = AttentionKnockout((DECISION,), (DECISION - 1,))
    before = pair.run([knockout])

    def explode(*_: Any) -> None:
        raise ValueError("boom")

    layers = pair.subject.architecture.decoder_layers(pair.subject.model)
    bomb = layers[2].mlp.register_forward_hook(explode)
    with pytest.raises(ValueError, match="boom"):
        pair.run([knockout])
    bomb.remove()
    assert not any(layer._forward_pre_hooks for layer in layers)
    assert torch.equal(pair.run([knockout]), before)


def test_sweep_refusals() -> None:
    pair = Pair("qwen3")
    with pytest.raises(UnsupportedError, match=f"no entry at position {DECISION}"):
        pair.run([KVPatch((DECISION,), pair.donor.cache)])
    with pytest.raises(UnsupportedError, match="no layer 3"):
        pair.run([KVPatch((FIELD,), pair.donor.cache, (3,))])
    with pytest.raises(UnsupportedError, match="different models"):
        pair.run([KVPatch((FIELD,), Pair("wide_heads").donor.cache)])
    with pytest.raises(UnsupportedError, match="15 or 16 entries"):
        run_patches(pair.subject, pair.ids, slice_cache(pair.base.cache, range(4))[0], [()])
    with pytest.raises(UnsupportedError, match="at least one intervention"):
        pair.run([])
    with pytest.raises(UnsupportedError, match="eager"):
        decide(pair.subject, pair.ids, pair.base.cache, attention=True)


def test_reduce_keeps_only_what_is_asked_and_planning_is_positive() -> None:
    pair = Pair("qwen3")
    rows = [KVPatch((place,), pair.donor.cache) for place in range(FIELD, DECISION)]
    kept = pair.run(rows, batch_size=4, reduce=lambda logits: logits[:, [5, 9]])
    torch.testing.assert_close(kept, pair.run(rows)[:, [5, 9]], atol=NOISE, rtol=0)
    assert plan_batch(pair.subject, 10**9) == plan_batch(pair.subject, 10**9, laid_out=True) == 1
    assert plan_batch(pair.subject, 100) > 64


def test_readout_by_hand() -> None:
    logits = torch.full((VOCABULARY,), -math.inf)
    logits[[4, 7, 9]] = torch.tensor([1.0, 2.0, 3.0]).log()
    readout = read(logits, base_answer_id=4, donor_answer_id=9)
    assert readout.margin == pytest.approx(math.log(3), abs=1e-6)
    assert (readout.probability_base, readout.probability_donor) == (pytest.approx(1 / 6), pytest.approx(1 / 2))
    assert readout.mass == pytest.approx(2 / 3)
    assert readout.argmax == 9
    assert read_rows(torch.stack([logits, logits]), 4, 9) == [readout, readout]
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5**0.5)
