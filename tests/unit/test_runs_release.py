"""The light form of finished runs: small, and with everything in it that cannot be made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import section_fakes
import yaml
from PIL import Image
from section_fakes import experiment, run
from typer.testing import CliRunner

from kvprobe.cli import look
from kvprobe.cli import release as command
from kvprobe.cli.app import app
from kvprobe.errors import StoreError
from kvprobe.report.section import write_section
from kvprobe.report.write import write_report
from kvprobe.runs import RunResult, SectionResult, load_result, provenance, readings
from kvprobe.runs.explain import FIGURE_KEY
from kvprobe.runs.release import release
from kvprobe.runs.results import ROWS, SUMMARY
from kvprobe.runs.store import LOG

assert command
assert look


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SectionResult:
    for name in ("source_hash", "code_version"):
        monkeypatch.setattr(provenance, name, getattr(provenance, name))
    section_fakes.fix_provenance()
    section = run(tmp_path, [experiment("one", claims=section_fakes.CLAIMS[:1])], 1)
    for result in section.results:
        write_report(result)
    write_section(section, tmp_path)
    return section


def made_again(result: RunResult) -> dict[str, list[Any]]:
    return {name: list(model.effects) for name, model in result.models.items()}


def test_what_is_left_out_is_made_again(
    tmp_path: Path, section: SectionResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = section.results
    rows = pq.read_table(before.folder / ROWS)
    with (before.folder / LOG).open("a") as log:
        log.write(json.dumps({"event": "started", "machine": {"host": "secret", "process": 12345, "cores": 2}}) + "\n")
    assert [run.folder for run in release(tmp_path)] == [before.folder]
    after = load_result(before.folder)
    assert {file.name for file in before.folder.iterdir()} == {SUMMARY, ROWS, LOG, "config.yaml", "cells"}
    assert pq.read_table(before.folder / ROWS).equals(rows)
    told = (before.folder / LOG).read_text()
    assert "secret" not in told
    assert "12345" not in told
    assert '"cores": 2' in told
    # Claims are judged without reading a row.
    monkeypatch.setattr(readings.EffectsOfRows, "_all", property(lambda self: pytest.fail("it reads rows")))
    assert after.verdicts == before.verdicts
    assert [len(model.stored_effects) for model in after.models.values()] == [1, 1]
    assert all(model.effects for model in after.models.values())
    assert after.models["red"].effect("field_only.recovery") == before.models["red"].effect("field_only.recovery")
    monkeypatch.undo()
    assert made_again(load_result(before.folder)) == made_again(before)
    assert write_report(load_result(before.folder)).figures[0].is_file()


def test_a_light_run_stays_as_it_is_and_goes_on_from_its_cells(tmp_path: Path, section: SectionResult) -> None:
    (before,) = section.results
    release(tmp_path)
    light = section_fakes.contents(tmp_path)
    release(before.folder)
    assert section_fakes.contents(tmp_path) == light
    (again,) = run(tmp_path, [before.config], 1).results
    assert again == before


@pytest.mark.parametrize(
    "line", ["[" * 10**5, "[]", "{}", "null", '{"event"', '{"event": "claims", "time": "2", "claims": [{"id": "x"}]}']
)
def test_a_damaged_log_is_one_sentence(tmp_path: Path, section: SectionResult, line: str) -> None:
    (before,) = section.results
    with (before.folder / LOG).open("a") as log:
        log.write(f"{line}\n")
    summary = (before.folder / SUMMARY).read_bytes()
    with pytest.raises(StoreError, match=r"^[^\n]*log\.jsonl is damaged [^\n]*$"):
        release(tmp_path)
    assert (before.folder / SUMMARY).read_bytes() == summary


def test_figures_of_sections_keep_what_they_say(tmp_path: Path, section: SectionResult) -> None:
    (figure,) = tmp_path.glob("section*.png")
    with Image.open(figure) as drawn:
        size, said = drawn.size, drawn.info[FIGURE_KEY]
    before = figure.stat().st_size
    release(tmp_path)
    assert figure.stat().st_size < before / 2
    with Image.open(figure) as drawn:
        assert (drawn.size, drawn.info[FIGURE_KEY]) == (size, said)


def test_the_command_says_what_it_did(tmp_path: Path, section: SectionResult) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# Ours\n\n<!-- counts -->\nold\n<!-- end of counts -->\n\nmore\n")
    done = CliRunner().invoke(app, ["release", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "section3: paper: 2 hold\n" in done.output
    counts = "|  | The paper's claims |\n| --- | --- |\n| [section3](section3.md) | 2 hold |"
    assert readme.read_text() == f"# Ours\n\n<!-- counts -->\n{counts}\n<!-- end of counts -->\n\nmore\n"
    assert "1 run in the light form: 0.0 MB" in done.output
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["release", str(tmp_path / "empty")])
    assert done.exit_code == 1
    assert "holds no finished run" in done.output


def test_claims_of_today_are_judged_on_what_was_measured(tmp_path: Path, section: SectionResult) -> None:
    (before,) = section.results
    file = tmp_path / "one.yaml"
    kept, added = section_fakes.CLAIMS[0], section_fakes.CLAIMS[1]
    changed = {**kept, "statement": "field_only.recovery > 0.15", "paper_value": 0.9}
    lost = {"id": "lost", "kind": "critique", "statement": "elsewhere.recovery > 0"}
    content = yaml.safe_load(before.config.to_yaml())
    file.write_text(yaml.safe_dump({**content, "claims": [changed, added, lost]}))
    old = json.loads((before.folder / SUMMARY).read_text())
    # As a version that hashed claims and had other words for outcomes left it.
    for verdict in old["verdicts"]:
        verdict["outcome"] = {"holds": "reproduced", "fails": "contradicted"}.get(verdict["outcome"], "inconclusive")
        del verdict["tier"], verdict["paper_model"], verdict["p_reason"]
    del old["sha256"]
    moved = before.folder.rename(before.folder.parent / "0123456789ab")
    (moved / SUMMARY).write_text(json.dumps({**old, "source": str(file), "hash": "0123456789ab" * 5}))
    assert [v.outcome for v in load_result(moved).verdicts] == [v.outcome for v in before.verdicts]
    (folder,) = [run.folder for run in release(moved)]
    after = load_result(folder)
    assert folder == before.folder
    assert after.hash == before.hash
    assert set(after.rows()["experiment"]) == {before.hash}
    outcomes = {(v.claim, v.model): str(v.outcome) for v in after.verdicts}
    assert outcomes["local", "red"] == "fails"
    assert outcomes["rest", "red"] == "fails"
    assert outcomes["lost", "red"] == "not applicable"
    assert next(v for v in after.verdicts if v.claim == "lost").reason == (
        "This run did not measure elsewhere.recovery; run the experiment again."
    )
    assert after.config.claims[0].statement == "field_only.recovery > 0.15"
    assert made_again(after) == made_again(before)
