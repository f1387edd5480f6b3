"""Laws of the off-template probe, and one margin against plain Hugging Face in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rows import made_rows
from worded_models import aligned, effects_of, measured, plain_margin, worded

from kvprobe.probes.mechanism.off_template.probe import OffTemplate
from kvprobe.report.reference import paper_values
from kvprobe.tasks.base import TASKS
from kvprobe.tasks.pairs import Pair

TEMPLATES = ("two_hop", "conversation", "lookup")
PROBE = OffTemplate()


def pairs_of(template: str, size: int) -> list[Pair]:
    return aligned(TASKS.get(template)(size=size))


@pytest.mark.parametrize("template", TEMPLATES)
def test_everything_from_the_field_on_is_the_donor(template: str) -> None:
    rows = measured(PROBE, worded("gemma2"), pairs_of(template, 3))
    assert set(rows["template"]) == {template}
    full = rows[rows["intervention"] == "full_downstream"]
    assert (full["margin"] - full["m_donor"]).abs().max() < 1e-9
    assert not rows.isna().any().any()


@pytest.mark.parametrize("template", TEMPLATES)
def test_against_plain_hugging_face(template: str) -> None:
    subject, (pair,) = worded("qwen3"), pairs_of(template, 1)
    rows = measured(PROBE, subject, [pair]).set_index("intervention")
    span = range(pair.field.start, pair.decision_position)
    for name, positions in {"field_only": span[:1], "suffix_10": span[-math.ceil(len(span) / 10) :]}.items():
        assert rows.loc[name, "margin"] == pytest.approx(plain_margin(subject, pair, positions), abs=1e-9)


def test_pairs_of_other_tasks_are_called_own() -> None:
    (pair,) = pairs_of("two_hop", 1)
    rows = measured(PROBE, worded("qwen3"), [replace(pair, scenario=replace(pair.scenario, attributes={}))])
    assert set(rows["template"]) == {"own"}


def rows_where(template: str, first: int, field: float, suffix: float) -> pd.DataFrame:
    doses = (("field_only", 0.01, field), ("suffix_50", 0.5, suffix), ("full_downstream", 1.0, 1.0))
    rows = made_rows({"intervention": name, "fraction": part, "recovery": recovery} for name, part, recovery in doses)
    return rows.assign(template=template, pair=first + rows["pair"])


@given(field=st.floats(-0.5, 1.2), suffix=st.floats(-0.5, 1.2))
def test_summary_finds_what_was_put_in_for_each_template(field: float, suffix: float) -> None:
    rows = pd.concat([rows_where("two_hop", 0, field, suffix), rows_where("lookup", 10, field / 2, suffix / 2)])
    effects = effects_of(PROBE, rows)
    assert effects["two_hop.field_only.recovery"].estimate == pytest.approx(field, abs=1e-9)
    assert effects["lookup.field_only.recovery"].estimate == pytest.approx(field / 2, abs=1e-9)
    assert effects["lookup.suffix_50.recovery"].estimate == pytest.approx(suffix / 2, abs=1e-9)
    assert effects["two_hop.suffix_for_80"].estimate == (0.5 if suffix >= 0.8 else 1.0)
    assert effects["full_downstream.error"].estimate == 0.0


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-4B", "Llama-3.1-8B"])
def test_the_paper_has_the_values_that_the_probe_names(model: str) -> None:
    paper = PROBE.read_by().paper
    known = paper_values(paper, model)
    assert set(known) == set(paper)
    assert known["lookup.full_downstream.recovery"] == 1.0
