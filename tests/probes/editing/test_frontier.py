"""Laws of the frontier probe: what arms decide against plain Hugging Face, what they cost, and what is on the front."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import effects_of, gated, margin_of, measured, plain_logits, plain_patched_logits, worded

from kvprobe.edit.base import make_method
from kvprobe.errors import UnknownNameError, UnsupportedError
from kvprobe.figures.cost_gain import pareto_front
from kvprobe.probes.editing.frontier.probe import REFERENCE, Frontier
from kvprobe.probes.kit.edit_arms import (
    as_patch,
    bytes_written,
    copied,
    make_arm,
    oracle_cache,
    read_patches,
    recomputed,
    run_arm,
    same_value,
    selection_order,
)
from kvprobe.probes.kit.edit_cases import edit_case

PROBE = Frontier(sizes=(3,), share=0.2, criterion="suffix")
PAIR, OTHER = gated(2)


def edits(rows: pd.DataFrame, pair: int = 0) -> pd.DataFrame:
    return rows[(rows["edit"] == "new") & (rows["pair"] == pair)].set_index("arm")


def test_margins_against_plain_hugging_face() -> None:
    subject, pair = worded("qwen3"), PAIR
    found = edits(measured(PROBE, subject, [pair]))["margin"]
    line = edit_case(subject, pair).edit.erratum_ids
    old, new, task = pair.base.token_ids, pair.donor.token_ids, pair.base.spans["task"].start
    field, tail = list(pair.field.positions), list(old[task:])
    prompts = {
        "stale": plain_logits(subject.model, old),
        "full_reprefill": plain_logits(subject.model, new),
        "full_downstream": plain_logits(subject.model, new),
        "erratum": plain_logits(subject.model, [*old[:task], *line, *tail]),
        "field_only": plain_patched_logits(subject.model, old[:-1], new[:-1], field, old[-1:]),
        "field_and_erratum": plain_patched_logits(subject.model, old[:task], new[:task], field, [*line, *tail]),
        "oracle_copy_3": plain_patched_logits(
            subject.model, old[:-1], new[:-1], [*field, *range(len(old) - 4, len(old) - 1)], old[-1:]
        ),
    }
    for arm, logits in prompts.items():
        assert found[arm] == pytest.approx(margin_of(pair, logits), abs=1e-9), arm
    assert found["field_only"] != found["stale"]
    assert found["field_and_erratum"] != found["erratum"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_costs_are_those_of_the_tokens_that_run(family: str) -> None:
    subject, pair = worded(family, torch.float32), PAIR
    found = edits(measured(PROBE, subject, [pair]))
    ids, spans, field = pair.base.token_ids, pair.base.spans, pair.field
    before_decision, after = len(ids) - 1, len(ids) - 1 - field.end
    erratum = len(edit_case(subject, pair).edit.erratum_ids) + before_decision - spans["task"].start
    ought = {
        "stale": 0,
        "field_only": len(field),
        "selective_3": len(field) + 3,
        "erratum": erratum,
        "field_and_erratum": erratum + len(field),
        "full_downstream": len(field) + after,
        "full_reprefill": before_decision,
        "oracle_copy_3": before_decision,
    }
    for arm, tokens in ought.items():
        assert found["tokens"][arm] == pytest.approx(tokens), arm
    layers, chosen = subject.layers, -(-after // 5)
    deviation = (len(field) + after) * 2 / layers
    assert found["tokens"]["cacheblend_20"] == pytest.approx(len(field) + chosen + deviation)
    assert found["flops"].drop("stale").min() > 0 == found["flops"]["stale"]
    per_entry = found["bytes_written"]["full_reprefill"] / before_decision
    assert per_entry == edit_case(subject, pair).stale.cache.nbytes / before_decision
    assert found["bytes_written"]["selective_3"] == per_entry * (len(field) + 3)
    assert (found["seconds"].drop("stale") > 0).all()


def test_rotated_keys_are_written_too() -> None:
    subject, pair = worded("qwen3"), PAIR
    case = edit_case(subject, pair)
    longer = replace(case.edit, new_ids=(*case.edit.new_ids, case.edit.new_ids[-1]))
    edited = make_method("field_only").apply(subject, case.stale, longer)
    after = len(case.stale.cache) - pair.field.end
    entry = case.stale.cache.nbytes / len(case.stale.cache)
    assert bytes_written(case.stale, edited) == entry * (len(longer.new_ids) + after / 2)
    with pytest.raises(UnsupportedError, match="decide it by itself"):
        as_patch(case, edited)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_an_edit_to_the_same_value_does_not_move_the_decision(family: str) -> None:
    rows = measured(PROBE, worded(family, torch.float32), [PAIR, OTHER])
    same = rows[rows["edit"] == "same"]
    assert set(same["arm"]) == {"field_only", "selective_3", "cacheblend_20", "full_downstream", REFERENCE}
    assert (same["margin"] - same["m_base"]).abs().max() < 1e-4
    moved = edits(rows)["margin"] - edits(rows)["m_base"]
    assert abs(moved["stale"]) < 1e-4
    # A window keeps the field out of the decision's sight in a model that writes no notes.
    assert family != "qwen3" or abs(moved[REFERENCE]) > 1e-3


@given(size=st.integers(0, 12), criterion=st.sampled_from(["suffix", "random", "first_layer_deviation"]))
def test_patches_of_the_stale_cache_decide_as_the_methods_do(size: int, criterion: str) -> None:
    subject, (pair,) = worded("qwen3"), gated(1, seed=3)
    case = edit_case(subject, pair)
    order = selection_order(subject, case, criterion)
    oracle = oracle_cache(subject, case)
    patches = [recomputed(subject, case, order, size), copied(case, oracle, order, size)]
    for reading, method in zip(read_patches(subject, case, patches), ("selective", "oracle_copy"), strict=True):
        row = run_arm(subject, case, make_arm("arm", method, k=size, criterion=criterion))
        assert reading.margin == pytest.approx(row["margin"], abs=1e-9)
        assert reading.mass == pytest.approx(row["mass"], abs=1e-9)


def test_the_same_value_is_the_value_that_stands_there() -> None:
    same = same_value(edit_case(worded("llama"), PAIR))
    assert same.edit.new_ids == PAIR.base.token_ids[PAIR.field.start : PAIR.field.end]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_on_the_front_is_what_nothing_else_beats(points: list[tuple[int, int]]) -> None:
    def beaten(point: tuple[int, int]) -> bool:
        return any(c <= point[0] and g >= point[1] and (c, g) != point for c, g in points)

    assert pareto_front(points) == sorted({point for point in points if not beaten(point)})


def made_rows(shares: dict[str, float], pairs: int = 20) -> pd.DataFrame:
    """Rows in which the first so many pairs are decided rightly, each at the cost of a tenth of a prefill."""
    rows = crossed(pairs, arm=[arm.name for arm in PROBE.arms()])
    right = rows["arm"].eq(REFERENCE) | (rows["pair"] < rows["arm"].map(shares).fillna(0) * pairs)
    cost = rows["arm"].map({REFERENCE: 100.0, "hoist_to_end": 30.0}).fillna(10.0)
    costs = dict.fromkeys(("tokens", "flops", "seconds", "bytes_written"), cost)
    edited = rows.assign(edit="new", margin=4.0 * right - 2.0, correct=right, argmax=right.astype(int), **costs)
    same = crossed(pairs, arm=["field_only"]).assign(edit="same", margin=lambda rows: 1e-5 * rows["pair"] - 2.0)
    return pd.concat([edited, same], ignore_index=True)


@given(erratum=st.integers(0, 10), both=st.integers(0, 10))
def test_summary_finds_what_was_put_in(erratum: int, both: int) -> None:
    effects = effects_of(PROBE, made_rows({"erratum": erratum / 10, "field_and_erratum": both / 10}))
    for name in ("correct_rate", "recovery", "agreement"):
        assert effects[f"erratum.{name}"].estimate == pytest.approx(erratum / 10)
    assert effects["erratum.recovery"].extra["median"] == (1.0 if erratum > 5 else 0.5 if erratum == 5 else 0.0)
    assert effects["field_under_erratum.recovery"].estimate == pytest.approx((both - erratum) / 10)
    for share in ("token_share", "flop_share", "seconds_ratio"):
        assert effects[f"erratum.{share}"].estimate == pytest.approx(0.1)
        assert effects[f"{REFERENCE}.{share}"].estimate == 1.0
    assert effects["erratum.bytes_written"].estimate == 10.0
    assert effects["hoist_over_erratum.token_share"].estimate == pytest.approx(0.2)
    assert effects["no_op.error"].estimate == pytest.approx(19e-5)
    assert effects["baseline.first_option.correct_rate"].estimate == 1.0


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="erratum"):
        make_arm("typo", "eratum")
