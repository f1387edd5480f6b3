"""The probe of eviction: with all entries kept it is what the plain model does."""

from __future__ import annotations

import pytest
from worded_models import gated, margin_behind, measured, plain_margin, worded

from kvprobe.probes.editing.eviction.probe import METHODS, Eviction
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.wordings import WORDINGS

EXACT = 1e-5


def test_with_all_entries_kept_it_is_the_plain_model() -> None:
    subject, (pair,) = worded(), gated(1, seed=3)
    rows = measured(Eviction(budgets=(100,)), subject, [pair])
    assert list(rows["method"]) == list(METHODS)
    said, start = pair.scenario.attributes, pair.base.spans["task"].start
    erratum = WORDINGS.get(pair.scenario.wording)().update(said["entity"], said["field"], said["new"])
    amended = [
        *pair.base.token_ids[:start],
        *encode_segment(erratum, subject.tokenizer),
        *pair.base.token_ids[start:],
    ]
    for row in rows.to_dict("records"):
        assert row["margin"] == pytest.approx(row["m_base"], abs=EXACT)
        assert row["right_donor"] == (row["m_donor"] > 0)
        assert row["margin_field_only"] == pytest.approx(plain_margin(subject, pair, pair.field.positions), abs=EXACT)
        assert row["margin_downstream_only"] == pytest.approx(
            plain_margin(subject, pair, [p for p in pair.downstream.positions if p < pair.decision_position]), abs=EXACT
        )
        assert row["new_after_erratum"] == (margin_behind(subject, pair, amended) > 0)
        assert row["kept_field"] == row["kept_policy"] == row["kept_delimiters"] == 1.0


def test_less_is_kept_of_a_smaller_budget() -> None:
    rows = measured(Eviction(budgets=(10, 50)), worded(), gated(1)).set_index(["method", "budget"])
    assert rows.loc[("streaming_llm", 10), "kept_policy"] <= rows.loc[("streaming_llm", 50), "kept_policy"] < 1
    assert rows.loc[("delimiters", 50), "kept_delimiters"] == 1.0
    assert rows.loc[("no_delimiters", 50), "kept_delimiters"] < 0.5
