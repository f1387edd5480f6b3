"""Laws of the field-position probe and of suffix doses, and one margin against plain Hugging Face in float64."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rows import made_rows
from tiny_models import WINDOW
from worded_models import aligned, effects_of, measured, plain_margin, worded

from kvprobe.probes.kit.doses import FRACTIONS, suffix
from kvprobe.probes.mechanism.field_position.probe import FieldPositionProbe
from kvprobe.report.reference import paper_values
from kvprobe.tasks.field_position import FieldPosition
from kvprobe.tasks.pairs import Pair

PROBE = FieldPositionProbe()


def pairs_of(size: int, **parameters: Any) -> list[Pair]:
    return aligned(FieldPosition(size=size, **parameters))


@given(fraction=st.floats(0.001, 1.0), more=st.floats(0.0, 1.0))
def test_suffixes_are_nested_and_end_before_the_decision(fraction: float, more: float) -> None:
    (pair,) = pairs_of(1)
    small, large = suffix(pair, fraction), suffix(pair, min(1.0, fraction + more))
    assert set(small) <= set(large)
    assert small[-1] == pair.decision_position - 1
    assert suffix(pair, 1.0) == (*pair.field.positions, *pair.downstream.positions)
    whole = len(suffix(pair, 1.0))
    assert fraction * whole <= len(small) < fraction * whole + 1 + 1e-6


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_everything_from_the_field_on_is_the_donor(family: str) -> None:
    rows = measured(PROBE, worded(family), pairs_of(4))
    full = rows[rows["intervention"] == "full_downstream"]
    assert (full["margin"] - full["m_donor"]).abs().max() < 1e-9
    assert rows["noise_floor"].max() < 1e-5
    assert len(rows) == 4 * (len(FRACTIONS) + 2)
    assert not rows.drop(columns=["window", "inside_window"]).isna().any().any()


def test_against_plain_hugging_face() -> None:
    subject, (pair,) = worded("llama"), pairs_of(1)
    rows = measured(PROBE, subject, [pair]).set_index("intervention")
    span = range(pair.field.start, pair.decision_position)
    for name, positions in {"field_only": span[:1], "suffix_50": span[-math.ceil(len(span) / 2) :]}.items():
        assert rows.loc[name, "margin"] == pytest.approx(plain_margin(subject, pair, positions), abs=1e-9)


def test_a_window_is_told_and_only_where_there_is_one() -> None:
    rows = measured(PROBE, worded("mistral"), pairs_of(2, field_slots=("end",), notes=(0,), mentions=(0,)))
    assert (rows["window"] == WINDOW).all()
    assert (rows["inside_window"] == (rows["distance"] < WINDOW)).all()
    assert measured(PROBE, worded("llama"), pairs_of(1))["window"].isna().all()


def rows_where(field_only: dict[tuple[int, int], float], reached: float = 0.3) -> pd.DataFrame:
    """Rows of 10 scenarios in the cells (notes, mentions), where the field alone recovers just so."""
    cells = []
    for cell, ((notes, mentions), recovery) in enumerate(field_only.items()):
        doses = {f"suffix_{round(100 * f)}": (f, 1.0 if f >= reached else 0.1) for f in (0.1, 0.3, 0.5)}
        cases = [
            {"intervention": name, "fraction": fraction, "recovery": recovered}
            for name, (fraction, recovered) in {
                "field_only": (0.01, recovery),
                **doses,
                "full_downstream": (1.0, 1.0),
            }.items()
        ]
        rows = made_rows(cases, gaps=[8.0] * 10, base=-3.0)
        place = {"slot": "start", "slot_order": 0, "notes": notes, "mentions": mentions, "distance": 20 + 10 * notes}
        scenario = {"scenario": rows["pair"], "pair": 10 * cell + rows["pair"], "window": None, "inside_window": None}
        cells.append(rows.assign(**place, **scenario))
    return pd.concat(cells, ignore_index=True)


@given(
    base=st.floats(-0.2, 0.6), distance=st.floats(-0.3, 0.3), mentions=st.floats(-0.3, 0.3), reached=st.floats(0.05, 1)
)
def test_summary_finds_the_effect_of_each_factor(base: float, distance: float, mentions: float, reached: float) -> None:
    cells = {(n, m): base + distance * (n == 12) + mentions * (m == 4) for n in (4, 12) for m in (0, 4)}
    effects = effects_of(PROBE, rows_where(cells, reached))
    assert effects["distance.field_only_difference"].estimate == pytest.approx(distance, abs=1e-9)
    assert effects["mentions.field_only_difference"].estimate == pytest.approx(mentions, abs=1e-9)
    assert effects["distance.suffix_for_80_difference"].estimate == 0.0
    assert "slot.field_only_difference" not in effects
    for (notes, named), recovery in cells.items():
        effect = effects[f"start.notes_{notes}.mentions_{named}.field_only.recovery"]
        assert effect.estimate == pytest.approx(recovery, abs=1e-9)
        assert effect.clusters == 10
    ought = min([f for f in (0.1, 0.3, 0.5) if f >= reached], default=1.0)
    below = max([f for f in (0.0, 0.1, 0.3, 0.5) if f < ought])
    dose = effects["start.suffix_for_80"]
    # All pairs agree, and still the smallest suffix is known to the step between two doses only.
    assert (dose.estimate, dose.low) == pytest.approx((ought, below))
    assert not any("window" in name for name in effects)


def test_a_cell_that_lost_all_its_pairs_leaves_the_others() -> None:
    rows = rows_where({(4, 0): 0.0, (12, 0): 0.5})
    effects = effects_of(PROBE, rows[rows["notes"] == 4])
    assert "start.notes_12.mentions_0.field_only.recovery" not in effects
    assert "distance.field_only_difference" not in effects
    assert effects["start.field_only.recovery"].estimate == pytest.approx(0.0, abs=1e-9)


def test_windows_split_the_pairs() -> None:
    rows = rows_where({(4, 0): 0.4, (44, 0): 0.0})
    rows = rows.assign(window=100.0, inside_window=rows["distance"] < 100)
    effects = effects_of(PROBE, rows)
    assert effects["inside_window.field_only.recovery"].estimate == pytest.approx(0.4)
    assert effects["outside_window.field_only.recovery"].estimate == pytest.approx(0.0, abs=1e-9)


def test_the_smallest_suffix_is_that_of_the_whole_where_none_is_enough() -> None:
    assert effects_of(PROBE, rows_where({(4, 0): 0.9}, reached=2.0))["start.suffix_for_80"].estimate == 1.0


def test_the_paper_has_the_values_that_the_probe_names() -> None:
    paper = PROBE.read_by().paper
    known = paper_values(paper, "Qwen3-8B")
    assert set(known) == set(paper)
    assert known["end.field_only.recovery"] == pytest.approx(0.113)
