"""Laws of the heads probe on tiny random models, its summary on rows made by hand, and one number by another way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worded_models import effects_of, gated, margin_of, measured, worded

from kvprobe.engine.components import components
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.sweep import run_patches
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.mechanism.heads.patches import (
    all_heads,
    before_decision,
    decision_shifts,
    donor_writes,
    kv_heads_from,
    read_heads,
    replace_heads,
)
from kvprobe.probes.mechanism.heads.probe import Heads
from kvprobe.probes.mechanism.heads.sets import (
    held_out_means,
    held_out_ranks,
    matched_heads,
    random_heads,
    ranked_heads,
)
from kvprobe.tasks.pairs import Pair

FAMILIES = ("qwen3", "mistral", "gemma2")


@cache
def pairs(size: int = 6) -> list[Pair]:
    return gated(size, wordings=("manual",), notes_before=(0, 0), notes_after=(0, 0))


@cache
def unedited(family: str, number: int = 0) -> PrefilledPair:
    return prefill_pair(worded(family, torch.float32), pairs()[number])


def patched_margin(family: str, patch: KVPatch) -> float:
    pair = pairs()[0]
    logits = run_patches(worded(family, torch.float32), pair.base.token_ids, unedited(family).stale, [patch])[0]
    return margin_of(pair, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_heads_together_are_the_donor_and_the_notes_are_a_cache_patch(family: str) -> None:
    subject, pair, decided = worded(family, torch.float32), pairs()[0], unedited(family)
    made, gap = components(subject), decided.donor.margin - decided.base.margin
    reading = read_heads(subject, made, pair, decided)
    every = all_heads(reading.base)
    stale = before_decision(pair, decided.stale)
    rows = [replace_heads(values, every) for values in (reading.donor, reading.base)]
    shifts = decision_shifts(made, pair, pair.base, stale, rows)
    assert shifts.tolist() == pytest.approx([gap, 0.0], abs=2e-3)
    # The donor's outputs at every position after the field are the donor's cache after the field.
    downstream = tuple(pair.downstream.positions)
    notes = patched_margin(family, KVPatch(downstream, decided.oracle)) - decided.base.margin
    writes = donor_writes(made, pair, decided, subject.layers)
    row = replace_heads(writes, every, downstream)
    before = decided.stale.take(slice(0, pair.field.end))
    written = decision_shifts(made, pair, pair.base, before, [row])
    assert float(written[0]) == pytest.approx(notes, abs=2e-3)
    whole = kv_heads_from(pair, decided, all_heads(reading.kv))
    assert patched_margin(family, whole) - decided.base.margin == pytest.approx(notes, abs=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_alone_reads_the_notes_as_its_layer_does(family: str) -> None:
    subject, pair, decided = worded(family, torch.float32), pairs()[0], unedited(family)
    made, last = components(subject), subject.layers - 1
    reading = read_heads(subject, made, pair, decided)
    # In the last layer all heads reading the notes are a patch of the notes in that layer alone.
    row = replace_heads(reading.note_reads, [(last, head) for head in range(4)])
    shifts = decision_shifts(made, pair, pair.base, before_decision(pair, decided.stale), [row])
    layer = patched_margin(family, KVPatch(tuple(pair.downstream.positions), decided.oracle, (last,), no_op=True))
    assert float(shifts[0]) == pytest.approx(layer - decided.base.margin, abs=1e-3)
    # Without any change there is none.
    same = replace(decided, oracle=decided.stale)
    still = read_heads(subject, made, replace(pair, donor=pair.base), same)
    for table in (still.read, still.read_notes, still.kv, still.attribution, still.write_attribution):
        assert float(table.abs().max()) < 1e-3


def test_the_first_order_estimate_is_the_effect_of_a_small_change() -> None:
    subject, pair, decided = worded("qwen3", torch.float32), pairs()[0], unedited("qwen3")
    made = components(subject)
    reading = read_heads(subject, made, pair, decided)
    # Large against rounding, small against the curvature.
    near = reading.base + 0.02 * (reading.donor - reading.base)
    heads = ranked_heads(reading.attribution.abs())[:4]
    rows = [replace_heads(near, [head]) for head in heads]
    shifts = decision_shifts(made, pair, pair.base, before_decision(pair, decided.stale), rows) / 0.02
    assert shifts.tolist() == pytest.approx([float(reading.attribution[head]) for head in heads], rel=0.1, abs=2e-3)


def test_one_read_head_agrees_with_plain_hugging_face_in_float64() -> None:
    subject, pair = worded("qwen3"), pairs()[1]
    layer, head, width = 1, 2, 8
    reading = read_heads(subject, components(subject), pair, prefill_pair(subject, pair))
    projection = subject.model.model.layers[layer].self_attn.o_proj
    seen: list[torch.Tensor] = []

    def run(ids: tuple[int, ...], replaced: torch.Tensor | None) -> torch.Tensor:
        def hook(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            context = args[0].clone()
            seen.append(context[0, -1, head * width : (head + 1) * width].clone())
            if replaced is not None:
                context[0, -1, head * width : (head + 1) * width] = replaced
            return (context,)

        handle = projection.register_forward_pre_hook(hook)
        try:
            with torch.no_grad():
                logits: torch.Tensor = subject.model(torch.tensor([ids])).logits[0, -1]
        finally:
            handle.remove()
        return logits

    run(pair.donor.token_ids, None)
    plain, patched = run(pair.base.token_ids, None), run(pair.base.token_ids, seen[0])
    expected = margin_of(pair, patched) - margin_of(pair, plain)
    assert abs(expected) > 1e-3
    assert float(reading.read[layer, head]) == pytest.approx(expected, abs=1e-5)


@given(size=st.integers(1, 10), seed=st.integers(0, 99))
def test_random_sets_match_in_size_and_layer(size: int, seed: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    ranked = ranked_heads(torch.tensor(generator.standard_normal((6, 4))))
    best = set(ranked[:size])
    free, matched = random_heads(ranked, size, generator), matched_heads(ranked, size, generator)
    for drawn in (free, matched):
        assert len(drawn) == len(set(drawn)) == size
        assert not best & set(drawn)
    # Every head stands in for one of the nearest layer that had one left.
    if max(sum(layer == other for other, _ in best) for layer, _ in best) <= 2:
        assert sorted(layer for layer, _ in matched) == sorted(layer for layer, _ in best)


def test_ranks_and_means_never_see_their_own_skeleton() -> None:
    names = ["a", "b", "c", "d"] * 2
    tables = [torch.arange(4.0).reshape(2, 2) for _ in names]
    ranks = held_out_ranks(names, tables, [True] * 8, 2, 0)
    assert ranks[0] == [(1, 1), (1, 0), (0, 1), (0, 0)]
    changed = [-1e6 * table if name == "a" else table for name, table in zip(names, tables, strict=True)]
    again = held_out_ranks(names, changed, [True] * 8, 2, 0)
    assert again[0] == again[4] == ranks[0]
    assert ranks != again
    means = held_out_means(names, changed, [True] * 8, 2, 0)
    assert torch.equal(means[0], tables[0])
    # A pair that the model gets wrong teaches nothing.
    assert held_out_ranks(names, changed, [name != "a" for name in names], 2, 0) == ranks


def heads(**parameters: Any) -> Heads:
    return Heads(folds=3, further_draws=2, write_heads=2, **parameters)


def test_rows_and_effects_of_a_random_model() -> None:
    probe = heads(sizes=(1, 3, 12), control_size=3, draws=5)
    rows = measured(probe, worded("gemma2", torch.float32), pairs())
    assert (rows[rows["measurement"] == "head"].groupby("pair").size() == 16).all()
    assert (rows[rows["measurement"] == "kv_head"].groupby("pair").size() == 8).all()
    assert (rows[rows["intervention"] == "read_matched_3"].groupby("pair").size() == 5).all()
    assert "kv_held_out_12" not in set(rows["intervention"])
    effects = effects_of(probe, rows)
    whole, direct = effects["read_held_out_3.recovery"], effects["read_direct_3.recovery"]
    indirect = effects["read_indirect_3.recovery"]
    assert indirect.estimate == pytest.approx(whole.estimate - direct.estimate, abs=1e-6)
    assert 0 <= effects["read_matched_3.reach_rate"].estimate <= 1


def test_batch_size_changes_nothing() -> None:
    rows, again = (
        measured(
            heads(sizes=(1, 3), control_size=3, draws=2, batch_size=size), worded("llama", torch.float32), pairs()[:3]
        )
        for size in (None, 7)
    )
    assert (rows["margin"] - again["margin"]).abs().max() < 1e-3


def made_rows() -> pd.DataFrame:
    """Ten pairs with a gap of 4 in which head h recovers h / 10 and attends by 1 - h / 10."""
    rows = []
    for pair in range(10):
        common = {"pair": pair, "skeleton": f"s{pair}", "m_base": -2.0, "m_donor": 2.0, "noise_floor": 1e-9}
        for head in range(5):
            one = {"layer": 0, "head": head, "margin": -2 + 0.4 * head, "attention": 1 - head / 10, "rank": 4 - head}
            rows.append({**common, "measurement": "head", "attribution": 2.0 * head, **one})
        for name, margin in (("read_held_out_2", 1.0), ("read_direct_2", 0.0), ("read_matched_2", -2.0)):
            size = {"intervention": name, "size": 2, "draw": 0, "margin": margin, "flipped": margin > 0}
            rows.append({**common, "measurement": "set", **size})
        ablated = {"margin_base_ablated": -1.0, "margin_donor_ablated": -0.5}
        rows.append({**common, "measurement": "ablation", "intervention": "ablate_held_out_2", "size": 2, **ablated})
    return pd.DataFrame(rows)


def test_summary_finds_what_was_put_in() -> None:
    found = {name: effect.estimate for name, effect in effects_of(Heads(), made_rows()).items()}
    assert found["read_held_out_2.recovery"] == pytest.approx(0.75)
    assert found["read_indirect_2.recovery"] == pytest.approx(0.25)
    assert found["read_held_out_2.flip_rate"] == 1.0
    assert found["read_matched_2.reach_rate"] == 0.0
    # Heads 2, 1 and 0 are outside the largest held-out set.
    assert found["read_single_others.recovery"] == pytest.approx(0.1)
    assert found["ablate_held_out_2.gap_retained"] == pytest.approx(0.125)
    assert found["ablate_held_out_2.accuracy"] == 0.5
    assert found["effect_attention.rank_correlation"] == pytest.approx(-1.0)
    assert found["effect_attribution.rank_correlation"] == pytest.approx(1.0)
