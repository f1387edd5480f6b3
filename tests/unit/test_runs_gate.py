"""The inclusion gate: pairs that flip beyond the noise count; where none does, those whose margin moves far."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.runs.config import GateConfig
from kvprobe.runs.gate import MARGIN_ONLY, GateReport, Grade, apply_gate, hopeless
from kvprobe.stats import StatisticsConfig

STATISTICS = StatisticsConfig()
Margins = list[tuple[float, float]]
margins = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=20)


def table(values: Margins, rows_per_pair: int = 1, **columns: object) -> pd.DataFrame:
    rows = [
        {"pair": pair, "skeleton": f"s{pair % 3}", "m_base": base, "m_donor": donor, **columns}
        for pair, (base, donor) in enumerate(values)
        for _ in range(rows_per_pair)
    ]
    return pd.DataFrame(rows)


def gated(rows: pd.DataFrame, **gate: float) -> tuple[pd.Series, GateReport]:
    return apply_gate(rows, GateConfig(**gate), STATISTICS, generated=20)  # type: ignore[arg-type]


@given(margins, st.floats(0, 1), st.integers(1, 3))
def test_every_pair_has_exactly_one_fate(values: Margins, floor: float, rows_per_pair: int) -> None:
    included, report = gated(table(values, rows_per_pair), noise_floor=floor)
    assert report.included + report.undecided + report.not_flipped + report.reversed == report.measured == len(values)
    assert included.sum() == report.included * rows_per_pair
    assert report.excluded == report.measured - report.included


@given(margins, st.floats(0, 1))
def test_what_counts_flips_beyond_the_noise(values: Margins, floor: float) -> None:
    rows = table(values)
    included, _ = gated(rows, noise_floor=floor)
    assert (rows.loc[included, "m_base"] < -floor).all()
    assert (rows.loc[included, "m_donor"] > floor).all()


@pytest.mark.parametrize(
    ("base", "donor", "fate"),
    [
        (-1, 1, "included"),
        (1, 2, "not_flipped"),
        (-2, -1, "not_flipped"),
        (1, -1, "reversed"),
        (-0.005, 1, "undecided"),
    ],
)
def test_fates(base: float, donor: float, fate: str) -> None:
    _, report = gated(table([(base, donor)]))
    assert getattr(report, fate) == 1


def test_a_measured_noise_floor_counts_when_it_is_larger() -> None:
    assert gated(table([(-0.5, 0.5)], noise_floor=0.6))[1].undecided == 1
    assert gated(table([(-0.5, 0.5)], noise_floor=0.1), noise_floor=0.6)[1].undecided == 1
    assert gated(table([(-0.5, 0.5)], noise_floor=None))[1].included == 1


def test_a_model_passes_by_its_accuracy() -> None:
    right, wrong = [(-1.0, 1.0)] * 9, [(-1.0, -1.0)]
    _, report = gated(table(right + wrong))
    assert report.passed
    assert report.oracle_accuracy is not None
    assert report.oracle_accuracy.estimate == pytest.approx(0.95)
    _, report = gated(table(right + wrong * 3))
    assert not report.passed
    assert "88% of the unedited prompts" in report.reason


def test_a_model_passes_by_the_mass_on_its_answers() -> None:
    _, report = gated(table([(-1.0, 1.0)] * 6, mass_base=0.9, mass_donor=0.3))
    assert not report.passed
    assert report.answer_mass == pytest.approx(0.3)
    assert gated(table([(-1.0, 1.0)] * 6, mass_base=0.9, mass_donor=0.6))[1].passed


def test_too_few_pairs_that_count() -> None:
    _, report = gated(table([(-1.0, 1.0)] * 3 + [(-1.0, -1.0)] * 3), oracle_accuracy=0.5)
    assert not report.passed
    assert report.reason.startswith("Only 3 of 6 pairs")
    assert gated(table([(-1.0, 1.0)]))[1].passed  # a single prompt of one's own


def test_a_model_that_decides_too_few_is_asked_for_its_margins() -> None:
    moving = [(-3.0, -2.0), (1.0, 2.5), (-1.0, 1.0)] * 4
    included, report = gated(table(moving, mass_base=0.9, mass_donor=0.9))
    assert (report.grade, report.passed) == (Grade.MARGIN, True)
    assert (report.included, report.moved, report.flipped) == (12, 12, 4)
    assert included.all()
    assert MARGIN_ONLY in report.reason
    assert gated(table(moving), oracle_accuracy=0.5, minimum_pairs=4)[1].grade is Grade.DECISION


@pytest.mark.parametrize(
    "columns",
    [{"noise_floor": 0.2}, {"mass_base": 0.1, "mass_donor": 0.1}],
    ids=["moves less than ten noise floors", "says something else"],
)
def test_margins_that_mean_nothing_are_refused(columns: dict[str, float]) -> None:
    _, report = gated(table([(-3.0, -2.0), (1.0, 2.5)] * 5, **columns))
    assert (report.grade, report.passed, report.included) == (None, False, 0)


def test_a_margin_that_moves_the_wrong_way_is_no_movement() -> None:
    assert gated(table([(2.0, -2.0)] * 10))[1].grade is None


@given(margins)
def test_a_model_is_not_refused_early_that_would_pass(values: Margins) -> None:
    rows = table(values)
    _, report = gated(rows, minimum_pairs=1)
    if report.grade is not None:
        assert not hopeless(rows.to_dict("records"), GateConfig(), STATISTICS)
        assert not hopeless(rows.to_dict("records"), GateConfig(), STATISTICS, all_seen=True)
