"""Laws of the injection probe, and one number against plain Hugging Face."""

from __future__ import annotations

import pytest
from made_rows import made_rows
from worded_models import effects_of, gated, measured, plain_margin, worded

from kvprobe.probes.kit.directions import DIRECTIONS
from kvprobe.probes.mechanism.injection.probe import Injection
from kvprobe.runs.config import GateConfig
from kvprobe.runs.gate import apply_gate
from kvprobe.stats import Effect, StatisticsConfig

PAIRS = gated(3)
SMALL = Injection(sizes=(1, 4), random_draws=2, folds=2)


def test_both_directions_agree_with_the_plain_script_in_float64() -> None:
    rows = measured(SMALL, worded(), PAIRS)
    whole = rows[(rows["intervention"] == "all_notes") & (rows["pair"] == 1)].set_index("direction")
    for direction, way in zip(DIRECTIONS, (PAIRS[1], PAIRS[1].reversed()), strict=True):
        expected = plain_margin(worded(), way, way.downstream.positions)
        assert whole.loc[direction, "margin"] == pytest.approx(expected, abs=1e-9)


def test_the_two_directions_are_mirror_images_and_the_gate_reads_the_first() -> None:
    rows = measured(SMALL, worded(), PAIRS)
    forth, back = (
        rows[rows["direction"] == direction].groupby("pair")[["m_base", "m_donor"]].first() for direction in DIRECTIONS
    )
    assert forth["m_base"].add(back["m_donor"]).abs().max() < 1e-9
    assert forth["m_donor"].add(back["m_base"]).abs().max() < 1e-9
    _, report = apply_gate(rows, GateConfig(), StatisticsConfig(), generated=3)
    right = (forth["m_base"] < 0) & (forth["m_donor"] > 0)
    assert report.included <= right.sum()
    assert report.measured == 3


def effects_where(recovery: float, base: float, donor: float, *, argmax: bool) -> dict[str, Effect]:
    case = {"intervention": "all_notes", "recovery": recovery, "injected_is_argmax": argmax}
    cases = [{**case, "direction": direction} for direction in DIRECTIONS]
    return effects_of(SMALL, made_rows(cases, gaps=[donor - base] * 10, base=base))


def test_a_margin_that_moves_without_turning_the_decision_is_no_flip() -> None:
    """As on the paper's Llama, whose two margins have the same sign (critique G2): following says 1, flipping 0."""
    effects = effects_where(1.0, -4.3, -0.6, argmax=False)
    assert effects["all_notes.recovery"].estimate == pytest.approx(1.0)
    assert effects["all_notes.margin_shift"].estimate == pytest.approx(3.7)
    assert effects["all_notes.half_shift_rate"].estimate == 1.0
    assert effects["all_notes.flip_rate"].estimate == 0.0
    assert effects["all_notes.argmax_rate"].estimate == 0.0


def test_a_small_shift_may_turn_a_decision_that_was_close() -> None:
    effects = effects_where(0.2, -1.0, 9.0, argmax=True)
    assert effects["all_notes.flip_rate"].estimate == 1.0
    assert effects["all_notes.half_shift_rate"].estimate == 0.0
    assert {f"all_notes_{direction}.recovery" for direction in DIRECTIONS} <= set(effects)
