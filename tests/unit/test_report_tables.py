"""Tables hold every verdict with its counts, and failures as visibly as successes."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_fakes import finished_run
from rich.console import Console

from kvprobe.report.tables import (
    effect_table,
    interval,
    markdown_table,
    model_lines,
    number,
    verdict_lines,
    verdict_markdown,
    verdict_tables,
)
from kvprobe.report.write import write_index, write_report
from kvprobe.runs import RunResult
from kvprobe.runs.explain import explain
from kvprobe.stats import Effect, Label


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunResult:
    return finished_run(tmp_path, monkeypatch)


def shown(what: object, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1.0, "1"), (-0.0283, "-0.028"), (1e-7, "1.0e-07"), (float("inf"), "inf")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_an_exact_value_has_no_interval_and_a_range_says_so() -> None:
    effect = Effect(Label.of("x"), 0.5, 0.25, 0.75, 4, 2, method="range")
    assert interval(effect) == "0.500 range [0.250, 0.750]"
    assert interval(Effect(Label.of("x"), 0.0, 0.0, 0.0, 4, 2, method="exact")) == "0 exactly"


def test_every_claim_and_model_has_a_verdict(result: RunResult) -> None:
    lines = verdict_lines(result)
    outcomes = {(line.claim, line.model): str(line.outcome) for line in lines}
    assert outcomes == {
        ("local", "red"): "holds",
        ("wrong", "red"): "fails",
        ("local", "broken"): "not applicable",
        ("wrong", "broken"): "not applicable",
    }
    for width in (60, 80, 120):
        text = shown(verdict_tables(result, width), width)
        assert "fails" in text
        assert "24/" in text
        assert max(map(len, text.splitlines())) <= width


def test_markdown_keeps_its_columns(result: RunResult) -> None:
    table = verdict_markdown(result).split("\n\n")[0].splitlines()
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "✗ fails" in verdict_markdown(result)
    assert markdown_table(("a",), [("b|c",)]).endswith("| b\\|c |")


def test_models_and_effects(result: RunResult) -> None:
    assert "broken: failed" in shown(model_lines(result))
    assert "field_only.recovery" in shown(effect_table(result.effects))


def test_the_report_can_be_traced_back(result: RunResult, tmp_path: Path) -> None:
    report = write_report(result)
    text = report.summary.read_text()
    assert "Where does it act from?" in text
    assert "kvprobe run" in text
    assert report.figures[0].name in text
    copy = tmp_path / "elsewhere.png"
    copy.write_bytes(report.figures[0].read_bytes())
    assert explain(copy, tmp_path).result.hash == result.hash
    index = write_index([result], tmp_path).read_text()
    assert (tmp_path / index.split("](")[1].split(")")[0]).is_file()
