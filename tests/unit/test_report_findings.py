"""Findings: a sentence a probe and model, with the numbers of its effects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvprobe.probes.base import PROBES
from kvprobe.report.findings import findings, findings_markdown, findings_text
from kvprobe.runs import find_runs, load_result

RELEASED = Path(__file__).parents[2] / "results" / "released"
STATING = [name for name in PROBES.names() if not name.startswith("test_") and PROBES.get(name).read_by().finding]


def test_the_main_results_of_all_sections_are_stated() -> None:
    assert {"locality", "suffix_concentration", "frontier", "transplant", "unified_agent"} <= set(STATING)


@pytest.mark.parametrize("name", STATING)
def test_every_number_named_is_that_of_its_effect(name: str) -> None:
    (folder,) = find_runs(RELEASED, name)
    result = load_result(folder)
    said = findings([result, result])
    assert said
    names = re.findall(r"\{([\w.]+)\}", PROBES.get(name).read_by().finding)
    for model, (sentence,) in said.items():
        numbers = [float(text) for text in re.findall(r"(-?\d+\.\d+) \[", sentence)]
        wanted = [result.models[model].effect(effect).estimate for effect in names]
        assert numbers == pytest.approx(wanted, abs=0.051)
        assert sentence in findings_markdown([result])
        assert sentence in findings_text([result]).plain


def test_nothing_is_said_where_nothing_was_measured() -> None:
    (folder,) = find_runs(RELEASED, "off_template_lookup")
    assert findings([load_result(folder)]) == {}
    assert findings_markdown([]) == ""
