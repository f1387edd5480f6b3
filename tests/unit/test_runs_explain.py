"""From a figure or a number back to rows, configuration and command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import matplotlib as mpl
import pyarrow.parquet as pq
import pytest
import runs_fakes
import yaml
from report_fakes import finished_run
from rich.console import Console
from runs_fakes import FakeProbe, config, load_subject

from kvprobe.errors import StoreError, UnknownNameError
from kvprobe.html.page.write import page_html
from kvprobe.report.section import section_markdown
from kvprobe.report.section_tables import section_table
from kvprobe.report.tables import verdict_tables
from kvprobe.report.write import summary_markdown
from kvprobe.runs import load_config, preparation, provenance, run_experiment
from kvprobe.runs.explain import explain, figure_metadata
from kvprobe.runs.release import release
from kvprobe.runs.results import ALTERED, ROWS, SUMMARY, UNSIGNED, RunResult, find_runs, load_result
from kvprobe.runs.section import SectionResult

mpl.use("Agg")
MODELS = ["red", "hub/model"]
PROFILES = {"quick": {"task": {"size": 12}}}


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunResult:
    monkeypatch.setattr(provenance, "source_hash", lambda: "source")
    monkeypatch.setattr(preparation, "make_probe", lambda config: FakeProbe())
    source = tmp_path / "fake.yaml"
    source.write_text(yaml.safe_dump({**runs_fakes.CONFIG, "models": MODELS, "profiles": PROFILES}))
    loaded = load_config(source, profile="quick")
    return run_experiment(loaded, results_dir=tmp_path / "results", load_subject=load_subject)


def test_a_number_has_its_rows_and_its_command(result: RunResult, tmp_path: Path) -> None:
    about = explain("fake/red/field_only.recovery", tmp_path / "results")
    assert about.kind == "effect"
    assert set(about.rows["model"]) == {"red"}
    assert about.effects["red"] == result.models["red"].effect("field_only.recovery")
    assert about.command == f"kvprobe run {tmp_path / 'fake.yaml'} --profile quick"
    text = "\n".join(about.lines())
    assert "weights red-weights" in text
    assert "fake.yaml" in text


@pytest.mark.parametrize(
    ("target", "kind", "models"),
    [
        ("fake", "run", 2),
        ("fake/red", "model", 1),
        ("fake/downstream.recovery", "effect", 2),
        ("fake/local", "claim", 2),
        ("fake/hub/model", "model", 1),
        ("fake/hub/model/local", "claim", 1),
    ],
)
def test_names(result: RunResult, tmp_path: Path, target: str, kind: str, models: int) -> None:
    about = explain(target, tmp_path / "results")
    assert (about.kind, len(about.models)) == (kind, models)
    assert len(about.rows)
    if kind == "claim":
        assert {verdict.claim for verdict in about.verdicts} == {"local"}


def test_a_summary_that_its_rows_do_not_give_is_told(result: RunResult, tmp_path: Path) -> None:
    def warnings() -> list[str]:
        lines = explain("fake/red/local", tmp_path / "results").lines()
        return [line for line in lines if line.startswith("WARNING: red: ")]

    assert warnings() == []
    file = result.folder / SUMMARY
    summary = json.loads(file.read_text())
    (verdict,) = (v for v in summary["verdicts"] if (v["claim"], v["model"]) == ("local", "red"))
    (effect,) = (
        e for m in summary["models"] if m["name"] == "red" for e in m["effects"] if e["name"] == verdict["effect"]
    )
    verdict["outcome"] = "fails"
    file.write_text(json.dumps(summary))
    assert warnings() == ["WARNING: red: the summary says of local fails, its interval holds."]
    verdict["outcome"], effect["low"] = "holds", effect["low"] - 0.1
    file.write_text(json.dumps(summary))
    (told,) = warnings()
    assert "but its rows give" in told


@pytest.mark.parametrize("what", ["verdict", "provenance", "identity", "gate", "rows", "signature"])
def test_a_run_that_was_changed_since_says_so_wherever_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    result = finished_run(tmp_path, monkeypatch)
    assert load_result(result.folder).altered == ""
    file = result.folder / SUMMARY
    summary = json.loads(file.read_text())
    if what == "verdict":
        summary["verdicts"][0]["outcome"] = "open"
    elif what == "provenance":
        summary["provenance"]["code"] = {"version": "9", "commit": "0" * 40, "dirty": False}
    elif what == "identity":
        summary["models"][0]["identity"]["weights_sha256"] = "0" * 64
    elif what == "gate":
        summary["models"][0]["gate"]["included"] += 1
    elif what == "rows":
        rows = pq.read_table(result.folder / ROWS)
        pq.write_table(rows.slice(1), result.folder / ROWS)
    else:
        del summary["sha256"]
    file.write_text(json.dumps(summary))
    altered = load_result(result.folder)
    assert altered.altered == (UNSIGNED if what == "signature" else ALTERED)
    console, section, root = Console(width=200), SectionResult("section3", (altered,)), result.folder.parents[1]
    with console.capture() as shown:
        console.print(verdict_tables(altered), section_table(section, 200))
    assert shown.get().count(altered.altered) == 2
    assert altered.altered in summary_markdown(altered)
    assert altered.altered in section_markdown(section, root, ())
    assert altered.altered in page_html([section], root, [])
    assert f"WARNING: {altered.altered}" in explain(result.folder).lines()
    if what != "signature":
        with pytest.raises(StoreError, match="do not match"):
            release(result.folder)


def test_a_cell(result: RunResult, tmp_path: Path) -> None:
    key = result.models["hub/model"].cells[0]
    about = explain(key[:10], tmp_path / "results")
    assert about.kind == "cell"
    assert set(about.rows["cell"]) == {key}


def test_a_figure_even_when_it_was_copied_away(result: RunResult, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    inside = result.folder / "figures" / "fake.png"
    inside.parent.mkdir()
    Figure().savefig(inside, metadata=figure_metadata(result))
    outside = tmp_path / "elsewhere.png"
    shutil.copy(inside, outside)
    for path in (inside, outside):
        assert explain(path, tmp_path / "results").result == result
    with pytest.raises(StoreError, match=r"which is not in"):
        explain(outside, tmp_path / "no results")
    foreign = tmp_path / "foreign.png"
    Figure().savefig(foreign)
    with pytest.raises(StoreError, match="not a figure of kvprobe"):
        explain(foreign, tmp_path / "results")


def test_the_command_falls_back_to_the_resolved_copy(result: RunResult, tmp_path: Path) -> None:
    (tmp_path / "fake.yaml").unlink()
    about = explain("fake", tmp_path / "results")
    assert about.command == f"kvprobe run {result.folder / 'config.yaml'}"
    assert load_config(result.folder / "config.yaml").hash == result.hash


def test_unknown_names_are_told_with_the_nearest(result: RunResult, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'fake'"):
        explain("fakes", tmp_path / "results")
    with pytest.raises(UnknownNameError, match=r"field_only\.recovery"):
        explain("fake/field_only.recover", tmp_path / "results")
    with pytest.raises(UnknownNameError):
        explain("fake@0000", tmp_path / "results")


def test_the_newest_run_is_meant_unless_a_hash_is_given(result: RunResult, tmp_path: Path) -> None:
    newer = run_experiment(config(block_size=7), results_dir=tmp_path / "results", load_subject=load_subject)
    assert explain("fake", tmp_path / "results").result.hash == newer.hash
    assert explain(f"fake@{result.hash[:6]}", tmp_path / "results").result.hash == result.hash
    assert len(find_runs(tmp_path / "results")) == 2
