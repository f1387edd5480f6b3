"""A section's table and figure show everything, in narrow and wide terminals, and failures as visibly as successes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import section_fakes
from rich.console import Console
from runs_fakes import fake_effects
from section_fakes import experiment, run
from typer.testing import CliRunner

from kvprobe.cli import look
from kvprobe.cli.app import app
from kvprobe.errors import StoreError
from kvprobe.figures.by_model import draw_by_model, model_color
from kvprobe.figures.panel import Panel
from kvprobe.figures.spec import FigureSpec
from kvprobe.probes.base import Reading
from kvprobe.report.counts import TITLES
from kvprobe.report.section import Reports, write_section
from kvprobe.report.section_figure import MOST_PANELS, argument, pages_of
from kvprobe.report.section_tables import LOST, section_table, verdict_markdown
from kvprobe.runs import RunResult, SectionResult, provenance
from kvprobe.runs.explain import explain
from kvprobe.runs.results import Failure
from kvprobe.stats import Effect, Label

assert look


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> SectionResult:
    """Three experiments, one of which cannot be drawn, and one that failed."""
    configs = [
        experiment("steady", "3.1"),
        experiment("together", "3.2", probe="test_together"),
        experiment("wild", "3.3", models=["red", "broken"], claims=section_fakes.CLAIMS[:1]),
        experiment("bug", "3.4", parameters={"error": "out of luck"}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("source_hash", "code_version"):
            patch.setattr(provenance, name, getattr(provenance, name))
        section_fakes.fix_provenance()
        return run(tmp_path_factory.mktemp("results"), configs, 1)


def shown(section: SectionResult, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(section_table(section, width))
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_holds_every_verdict_at_every_width(section: SectionResult, width: int) -> None:
    text = shown(section, width)
    assert max(map(len, text.splitlines())) <= width
    body = text.split("verdicts  ")[0]
    outcomes = [verdict.word for _, verdict in section.verdicts()]
    for outcome in set(outcomes):
        assert body.count(f" {outcome}") == outcomes.count(outcome)
    assert {"holds", "fails", "passes", "not applicable"} <= set(outcomes)
    assert "RuntimeError: out of luck" in " ".join(text.split())
    assert ("n/cl/excl" in text) == (width >= 100)
    if width >= 80:
        # Each verdict on one line, with its model.
        lines = [line for line in body.splitlines() if line.startswith("  ") and "model" not in line]
        assert sum(line.split()[0] in ("red", "blue", "broken") for line in lines) == len(outcomes)
        assert "0.020" in body


def test_the_counts_add_up(section: SectionResult) -> None:
    rows = {line.split("  ")[0]: line.split()[-6:] for line in shown(section, 120).splitlines()}
    models = [rows[name] for name in ("red", "blue", "broken")]
    kinds = [rows[title] for title in TITLES.values() if title in rows]
    assert len(kinds) > 1
    results = [list(map(int, row)) for row in kinds[:-1]]
    assert [sum(int(row[i]) for row in models) for i in range(6)] == [sum(row[i] for row in results) for i in range(6)]
    # The other experiments show the same fake measurements.
    verdicts = [verdict for _, verdict in section.verdicts()]
    assert {verdict.shown_in for verdict in verdicts} == {"", "steady"}
    assert sum(sum(map(int, row[:5])) for row in kinds) == sum(not verdict.shown_in for verdict in verdicts)
    assert "(as in steady)" in shown(section, 120)


def test_a_verdict_that_adjustment_takes_away_is_marked(section: SectionResult) -> None:
    assert LOST not in shown(section, 120).split("verdicts  ")[0]
    first = section.results[0]
    weak = tuple(replace(verdict, p_value=0.04, headline=True) for verdict in first.verdicts)
    marked = SectionResult("section3", (replace(first, verdicts=weak), *section.results[1:]))
    assert shown(marked, 80).split("verdicts  ")[0].count(LOST) == sum(not v.survives for _, v in marked.verdicts()) > 0
    assert f"holds {LOST}" in verdict_markdown(marked)


def test_the_report_names_all_and_can_be_followed(section: SectionResult) -> None:
    folder = section.results[0].folder.parents[1]
    reports = Reports()
    for result in section.results:
        reports(result)
    assert [summary.name for summary in reports.summaries] == ["report.md"] * 3
    report = write_section(section, folder)
    assert [file.name for file in report.figures] == ["section3.png", "section3.svg"]
    assert [(failure.experiment, failure.message) for failure in report.failures] == [
        ("together", "ValueError: nothing to draw")
    ]
    text = report.summary.read_text()
    for result in section.results:
        assert (folder / f"{result.config.name}/{result.hash[:12]}/report.md").is_file()
        assert f"]({result.config.name}/{result.hash[:12]}/report.md)" in text
    assert "- **A**, steady: What does steady recover? n: red 12 of 12 pairs" in text
    assert "Intervals: 95%, cluster t." in text
    assert "failed: RuntimeError: out of luck" in text
    drawn = "".join(ElementTree.parse(report.figures[1]).getroot().itertext())
    for said in ("A", "B", "C", "steady", "What the fakes recover", "red", "the paper's value"):
        assert said in drawn
    with pytest.raises(StoreError, match=r"shows several runs; explain one of them: steady, together, wild\."):
        explain(report.figures[0], folder)
    again = [file.read_bytes() for file in report.figures]
    assert [file.read_bytes() for file in write_section(section, folder).figures] == again


def test_probes_without_a_main_plot_get_no_axes(section: SectionResult, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Failure] = []
    plain = Reading(fake_effects, FigureSpec("What the fakes recover", section_fakes.PARTS))
    monkeypatch.setattr(section_fakes.Together, "reading", plain)
    (page,) = pages_of(section, failures)
    assert [line.split(",")[0] for line in page.caption] == ["**A**", "**B**"]
    assert [bool(axes.axison) for axes in page.figure.axes] == [True, True]
    assert not failures
    monkeypatch.setattr(section_fakes.Blocks, "reading", plain)
    assert pages_of(section, failures) == []


def test_the_argument_comes_first_in_its_own_order_and_the_rest_follows(
    section: SectionResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = section.results[0]
    eight = tuple(replace(steady, config=steady.config.model_copy(update={"name": f"e{i}"})) for i in range(8))
    steps = {"e5": 1, "e2": 2}
    monkeypatch.setattr("kvprobe.report.section_figure._step", lambda result: steps.get(result.config.name, 0))
    shown = [[result.config.name for result in page.results] for page in pages_of(SectionResult("s", eight), [])]
    assert shown == [["e5", "e2"], ["e0", "e1", "e3", "e4", "e6", "e7"]]
    second = SectionResult("t", (replace(eight[0], config=eight[0].config.model_copy(update={"name": "e5"})),))
    both = [result.config.name for result in argument([SectionResult("s", eight), second])]
    assert both == ["e5", "e2", "e5"]
    steps.clear()
    assert [len(page.results) for page in pages_of(SectionResult("s", eight), [])] == [MOST_PANELS, 2]


def test_a_model_keeps_its_colour_where_another_is_missing() -> None:
    from matplotlib.figure import Figure

    effect = Effect(Label.of("x.recovery"), 0.5, float("-inf"), float("inf"), 9, 9)
    panels = [
        Panel("first", {"x.recovery": effect}),
        Panel("second", {"x.recovery": effect}, paper={"x.recovery": 0.4}),
    ]
    colors = []
    for given in (panels, [Panel("first", note="failed"), panels[1]]):
        axes = Figure().subplots()
        draw_by_model(axes, given, {"x.recovery": "x"})
        handles, labels = axes.get_legend_handles_labels()
        colors.append(handles[labels.index("second")][0].get_color())
        assert -0.6 <= axes.get_ylim()[0] < axes.get_ylim()[1] <= 1.6
    assert colors[0] == colors[1] == model_color(panels, panels[1]) != model_color(panels, panels[0])


def results_of(section: SectionResult, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kvprobe.runs.run_section", lambda *_, **__: section)
    return section.results[0].folder.parents[1]


def files(folder: Path, results: tuple[RunResult, ...]) -> list[str]:
    paths = [folder / f"{result.config.name}.yaml" for result in results]
    for path, result in zip(paths, results, strict=True):
        path.write_text(result.config.to_yaml().replace("red", "qwen3-8b").replace("blue", "gemma-2-9b-it"))
    return [str(path) for path in paths]


def test_the_command_ends_with_one_table_and_one_figure(
    section: SectionResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = results_of(section, monkeypatch)
    given = files(tmp_path, section.results[:2])
    done = CliRunner().invoke(app, ["run", *given, "--results", str(folder), "--jobs", "2"], env={"COLUMNS": "100"})
    assert done.exit_code == 1  # something failed, and the rest is there
    assert done.stdout.count("p adj.  ") == 1
    assert f"Figure: {folder / 'section3.png'}" in done.stdout
    assert f"Report: {folder / 'section3.md'}" in done.stdout
    assert "Error: bug: RuntimeError: out of luck" in done.stderr
    assert "Error: together: ValueError: nothing to draw" in done.stderr
    assert "_go_wrong" in done.stderr


def test_report_draws_the_sections_again(section: SectionResult, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = results_of(section, monkeypatch)
    (folder / "section3.png").unlink(missing_ok=True)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 1  # one cannot be drawn
    assert (folder / "section3.png").is_file()
    assert str(folder / "section3.md") in done.stdout
    assert str(folder / "report.md") in done.stdout
    assert "nothing to draw" in done.stderr


def test_no_panel_is_empty(section: SectionResult) -> None:
    three = SectionResult("section3", section.results[:1] * 3)
    (page,) = pages_of(three, [])
    assert len(page.caption) == len(page.figure.axes) == 3
    # A title that stands above another panel already gives way to the experiment's name.
    assert [axes.get_title() for axes in page.figure.axes] == ["What the fakes recover", "steady", "steady"]
    assert [text.get_text() for text in page.figure.legends[0].get_texts()] == ["red", "blue", "the paper's value"]


def test_an_experiment_without_any_measured_model_has_no_panel(tmp_path: Path) -> None:
    failed = run(tmp_path, [experiment("failed", models=["broken"])], 1)
    assert pages_of(failed, []) == []
    assert "broken: failed. The weights of broken are truncated; pull them again." in shown(failed, 120)
