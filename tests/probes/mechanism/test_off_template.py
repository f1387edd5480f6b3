"""Laws of the off-template probe, and one margin against plain Hugging Face in float64."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worded_models import aligned, effects_of, margin_of, measured, plain_patched_logits, worded

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
    base, donor = list(pair.base.token_ids), list(pair.donor.token_ids)
    length = len(base) - 1 - pair.field.start
    for name, positions in {
        "field_only": [pair.field.start],
        "suffix_10": list(range(len(base) - 1 - -(-length // 10), len(base) - 1)),
    }.items():
        logits = plain_patched_logits(subject.model, base[:-1], donor[:-1], positions, base[-1:])
        assert rows.loc[name, "margin"] == pytest.approx(margin_of(pair, logits), abs=1e-9)


def test_pairs_of_other_tasks_are_called_own() -> None:
    (pair,) = pairs_of("two_hop", 1)
    rows = measured(PROBE, worded("qwen3"), [replace(pair, scenario=replace(pair.scenario, attributes={}))])
    assert set(rows["template"]) == {"own"}


@given(field=st.floats(-0.5, 1.2), suffix=st.floats(-0.5, 1.2))
def test_summary_finds_what_was_put_in_for_each_template(field: float, suffix: float) -> None:
    fractions = {"field_only": 0.01, "suffix_50": 0.5, "full_downstream": 1.0}
    rows = pd.DataFrame(
        {
            "pair": number + 10 * (template == "lookup"),
            "skeleton": f"s{number}",
            "template": template,
            "intervention": name,
            "fraction": fractions[name],
            "m_base": -1.0,
            "m_donor": 4.0,
            "margin": 5.0 * recovery - 1.0,
            "flipped": 5.0 * recovery > 1.0,
            "noise_floor": 1e-6,
        }
        for template, scale in (("two_hop", 1.0), ("lookup", 0.5))
        for number in range(10)
        for name, recovery in zip(fractions, (scale * field, scale * suffix, 1.0), strict=True)
    )
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
