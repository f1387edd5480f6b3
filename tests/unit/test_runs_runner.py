"""Running: cells, gate, verdicts, what goes wrong, and going on after it did."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs_fakes
from runs_fakes import CONFIG, FAKE_READING, FakeProbe, Identity, config, contents, fake_effects, load_subject

import kvprobe
from kvprobe.errors import (
    AlignmentError,
    ConfigError,
    GateError,
    NumericsError,
    OutOfMemoryError,
    StoreError,
    UnknownNameError,
)
from kvprobe.report.write import summary_markdown
from kvprobe.runs import events, judgement, load_result, preparation, provenance, run_experiment, runner
from kvprobe.runs.claims import Outcome
from kvprobe.runs.events import Tracker
from kvprobe.runs.executors import InProcessExecutor, Measure, ModelTask, Outcomes, Tell
from kvprobe.runs.explain import explain
from kvprobe.runs.results import RunResult, Status
from kvprobe.runs.store import Store
from kvprobe.stats import Effect, Sample
from kvprobe.tasks.gated_decision import GatedDecision


@pytest.fixture(autouse=True)
def _fixed_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in runs_fakes.PROVENANCE.items():
        monkeypatch.setattr(provenance, name, lambda value=value: value)
    monkeypatch.setattr(os, "fsync", lambda number: None)  # slow; the killed subprocess keeps it


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> FakeProbe:
    fake = FakeProbe()
    monkeypatch.setattr(preparation, "make_probe", lambda config: fake)
    return fake


def run(folder: Path, changes: dict[str, Any] | None = None, **arguments: Any) -> RunResult:
    return run_experiment(config(**(changes or {})), results_dir=folder, load_subject=load_subject, **arguments)


def test_from_experiment_to_verdicts(tmp_path: Path, probe: FakeProbe) -> None:
    result = run(tmp_path)
    assert list(result.models) == ["red", "blue"]
    red = result.models["red"]
    assert red.status is Status.MEASURED
    assert red.gate is not None
    assert red.gate.included == red.gate.measured
    assert red.effect("field_only.recovery").estimate == pytest.approx(0.05, abs=0.05)
    outcomes = {(verdict.claim, verdict.model): verdict.outcome for verdict in result.verdicts}
    assert outcomes["local", "red"] is Outcome.HOLDS
    assert outcomes["rest", "blue"] is Outcome.FAILS
    assert not result.failed
    with pytest.raises(UnknownNameError, match=r"field_only\.recovery"):
        red.effect("field_only.recover")


def test_every_row_names_where_it_comes_from(tmp_path: Path, probe: FakeProbe) -> None:
    result = run(tmp_path)
    rows = result.rows()
    assert not rows[["experiment", "model", "pair_id", "skeleton", "wording", "cell", "included"]].isna().any().any()
    assert set(rows["cell"]) == {key for model in result.models.values() for key in model.cells}
    assert len(rows) == 2 * sum(model.gate.measured for model in result.models.values() if model.gate)
    beside = json.loads((result.folder / "cells" / f"{rows['cell'][0]}.json").read_text())
    assert beside["content"]["identity"]["weights_sha256"] == "red-weights"
    assert {"code", "threads", "experiment_hash"} <= set(beside["provenance"])
    assert {"base", "donor"} <= set(beside["content"]["pairs"][0])
    # The i-th pair is the same for both models, so paired comparisons between models are possible.
    by_model = rows.groupby("model")["pair_id"].unique()
    assert list(by_model["red"]) == list(by_model["blue"])


def test_a_second_run_computes_nothing_and_changes_nothing(tmp_path: Path, probe: FakeProbe) -> None:
    run(tmp_path)
    before, measured = contents(tmp_path), len(probe.measured)
    seen: list[events.Event] = []
    again = run(tmp_path, on_event=seen.append)
    assert len(probe.measured) == measured
    assert contents(tmp_path) == before
    ready = [event for event in seen if isinstance(event, events.ModelReady)]
    assert all(event.finished == event.cells > 0 for event in ready)
    assert load_result(again.folder) == again


def test_another_claim_measures_nothing_again(tmp_path: Path, probe: FakeProbe) -> None:
    first = run(tmp_path)
    measured = len(probe.measured)
    second = run(tmp_path, {"claims": [{"id": "local", "statement": "field_only.recovery < 0.2"}]})
    assert second.folder == first.folder
    assert len(probe.measured) == measured
    fewer = run(tmp_path, {"models": ["red"]})
    assert fewer.folder != first.folder
    assert len(probe.measured) == measured


@pytest.mark.parametrize("changed", ["parameters", "weights", "tokens", "packages", "source", "block"])
def test_what_determines_a_cell_is_in_its_key(
    tmp_path: Path, probe: FakeProbe, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    keys = set(run(tmp_path / "one").models["red"].cells)
    changes: dict[str, Any] = {}
    if changed == "parameters":
        probe.field_only = 0.1
    if changed == "weights":
        monkeypatch.setattr(runs_fakes, "identity", lambda name: Identity(name, f"/here/{name}", "other weights"))
    if changed == "tokens":
        changes = {"task": {**runs_fakes.CONFIG["task"], "seed": 7}}
    if changed == "packages":
        monkeypatch.setattr(provenance, "package_versions", lambda: {"torch": "0"})
    if changed == "source":
        monkeypatch.setattr(provenance, "source_hash", lambda: "another")
    if changed == "block":
        changes = {"block_size": 5}
    assert keys.isdisjoint(run(tmp_path / "two", changes).models["red"].cells)


def test_where_the_weights_lie_is_not_in_the_key(
    tmp_path: Path, probe: FakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path / "one")
    monkeypatch.setattr(runs_fakes, "identity", lambda name: Identity(name, "/elsewhere", f"{name}-weights"))
    assert run(tmp_path / "two").models["red"].cells == first.models["red"].cells


class _Backwards(InProcessExecutor):
    """The last model first, and three cells at a time."""

    size = 3

    def run(self, measure: Measure, tasks: Sequence[ModelTask], emit: Tell) -> Outcomes:
        return super().run(measure, list(reversed(tasks)), emit)


def test_the_executor_does_not_change_the_result(tmp_path: Path, probe: FakeProbe) -> None:
    run(tmp_path / "one")
    run(tmp_path / "two", executor=_Backwards(load_subject))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_ctrl_c_keeps_finished_cells_and_goes_on_to_the_same_bytes(
    tmp_path: Path, probe: FakeProbe, after: int
) -> None:
    run(tmp_path / "whole")
    whole = len(probe.measured)
    probe.measured.clear()

    def interrupt(subject: Any, pairs: Any) -> None:
        if len(probe.measured) > after:
            raise KeyboardInterrupt

    probe.before = interrupt
    seen: list[events.Event] = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", on_event=seen.append)
    assert seen[-1] == events.RunInterrupted(after, 10)
    probe.before = lambda subject, pairs: None
    run(tmp_path / "cut")
    assert len(probe.measured) == whole + 1
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_probe_that_needs_all_pairs_gets_them_in_one_cell(tmp_path: Path, probe: FakeProbe) -> None:
    probe.needs_all_pairs = True
    given: list[int] = []
    probe.before = lambda subject, pairs: given.append(len(pairs))
    seen: list[events.Event] = []
    first = run(tmp_path / "one", on_event=seen.append)
    assert given == [20, 20]
    assert [len(model.cells) for model in first.models.values()] == [1, 1]
    assert [event.cells for event in seen if isinstance(event, events.RunStarted)] == [2]
    assert [event.fraction for event in seen if isinstance(event, events.Progress)][-1] == 1.0
    before = contents(tmp_path / "one")
    run(tmp_path / "one")
    assert given == [20, 20]
    assert contents(tmp_path / "one") == before
    # The cell holds the same work whatever the block size of the file says.
    assert run(tmp_path / "two", {"block_size": 5}).models["red"].cells == first.models["red"].cells


def test_a_cell_of_all_pairs_that_was_cut_off_is_measured_again(tmp_path: Path, probe: FakeProbe) -> None:
    probe.needs_all_pairs = True
    run(tmp_path / "whole")

    def interrupt(subject: Any, pairs: Any) -> None:
        if subject.name == "blue":
            raise KeyboardInterrupt

    probe.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    probe.before = lambda subject, pairs: None
    probe.measured.clear()
    run(tmp_path / "cut")
    assert probe.measured == ["blue"]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def start(results: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, runs_fakes.__file__, str(results), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(Path(kvprobe.__file__).parents[1])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_kill_9_then_rerun_gives_the_bytes_of_an_uninterrupted_run(tmp_path: Path, probe: FakeProbe) -> None:
    """Here the rest is run in this process; where a run may be cut is a matter of Ctrl-C."""
    whole = run(tmp_path / "whole")
    cells = {key for model in whole.models.values() for key in model.cells}
    with start(tmp_path / "killed", 0.2) as killed:
        assert killed.stdout is not None
        finished = {killed.stdout.readline().strip() for _ in range(3)}
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert not list((tmp_path / "killed").rglob("summary.json"))
    probe.measured.clear()
    run(tmp_path / "killed")
    assert len(finished & cells) == 3
    # A killed run may have written one more cell than it could still tell of; none is computed twice.
    assert len(cells) - 4 <= len(probe.measured) <= len(cells) - 3
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_two_processes_on_one_folder_share_the_work(tmp_path: Path, probe: FakeProbe) -> None:
    shared = tmp_path / "shared"
    with start(shared, 0.4) as one, start(shared, 0.4) as other:
        for process in (one, other):
            process.communicate()
    assert (one.returncode, other.returncode) == (0, 0)
    logs = [json.loads(line) for log in shared.rglob("log.jsonl") for line in log.read_text().splitlines()]
    measured = [entry["cell"] for entry in logs if entry["event"] == "cell"]
    assert len(measured) == len(set(measured)) == 10
    run(tmp_path / "whole")
    assert contents(shared) == contents(tmp_path / "whole")


def test_a_cell_that_another_process_measures_is_waited_for(tmp_path: Path, probe: FakeProbe) -> None:
    cells = run(tmp_path / "whole").models["red"].cells
    other = Store(tmp_path / "cut", "fake", "ab" * 32)
    whole = Store(tmp_path / "whole", "fake", config().hash)

    def finish() -> None:
        """Another process, whose claims are others, finishes the cell when this one has nothing else to do."""
        with other.claimed(cells[0]) as mine:
            assert mine
            begun.set()
            deadline = time.monotonic() + 60
            while not any(isinstance(event, events.Warned) for event in seen) and time.monotonic() < deadline:
                time.sleep(0.01)
            for suffix in (".parquet", ".json"):
                file = whole.cells / f"{cells[0]}{suffix}"
                (other.cells / file.name).write_bytes(file.read_bytes())

    probe.measured.clear()
    seen: list[events.Event] = []
    begun = threading.Event()
    thread = threading.Thread(target=finish)
    thread.start()
    assert begun.wait(60)
    result = run(tmp_path / "cut", on_event=seen.append)
    thread.join()
    (warned,) = (event for event in seen if isinstance(event, events.Warned))
    assert warned.message.startswith("Another process measures a cell of red into ")
    assert len(probe.measured) == 9
    assert contents(result.folder) == contents(whole.folder)


@pytest.mark.parametrize("error", [NumericsError("The logits are NaN."), OutOfMemoryError("No room for one row.")])
def test_a_failed_cell_is_told_and_the_others_are_kept(tmp_path: Path, probe: FakeProbe, error: Exception) -> None:
    def fail_once(subject: Any, pairs: Any) -> None:
        if subject.name == "red" and len(probe.measured) == 2:
            raise error

    probe.before = fail_once
    seen: list[events.Event] = []
    result = run(tmp_path, on_event=seen.append)
    red, blue = result.models["red"], result.models["blue"]
    assert [event.message for event in seen if isinstance(event, events.CellFailed)] == [str(error)]
    assert red.status is Status.FAILED
    assert str(error) in red.reason
    assert red.gate is not None
    assert red.gate.failed == 4
    assert blue.status is Status.MEASURED
    assert len(red.cells) == len(blue.cells) - 1
    assert result.failed
    by_model = {verdict.model: verdict.outcome for verdict in result.verdicts if verdict.claim == "local"}
    assert by_model == {"red": Outcome.NOT_APPLICABLE, "blue": Outcome.HOLDS}
    probe.before = lambda subject, pairs: None
    probe.measured.clear()
    again = run(tmp_path)
    assert probe.measured == ["red"]  # the failed cell alone
    assert not again.failed


def test_a_value_that_is_no_number_fails_its_cell(tmp_path: Path, probe: FakeProbe) -> None:
    probe.change = lambda row: {**row, "margin": float("nan")}
    result = run(tmp_path)
    assert result.failed
    assert "'margin' is nan" in result.models["red"].failures[0]
    assert not list((result.folder / "cells").iterdir())
    assert load_result(result.folder) == result


def test_a_model_that_cannot_be_loaded_leaves_the_others(tmp_path: Path, probe: FakeProbe) -> None:
    result = run(tmp_path, {"models": ["broken", "blue"]})
    assert result.models["broken"].status is Status.FAILED
    assert result.models["broken"].reason == "The weights of broken are truncated; pull them again."
    assert result.models["blue"].status is Status.MEASURED
    with pytest.raises(UnknownNameError, match=r"did you mean 'blue'"):
        run(tmp_path, {"models": ["bleu"]})


def test_a_model_that_cannot_do_the_task_is_not_applicable(tmp_path: Path, probe: FakeProbe) -> None:
    probe.change = lambda row: {**row, "m_donor": row["m_base"]}
    result = run(tmp_path)
    red = result.models["red"]
    assert red.status is Status.NOT_APPLICABLE
    assert red.effects == ()
    assert red.gate is not None
    assert red.gate.oracle_accuracy is not None
    assert red.gate.oracle_accuracy.estimate == 0.5
    assert red.gate.not_flipped == red.gate.measured
    assert {verdict.outcome for verdict in result.verdicts} == {Outcome.NOT_APPLICABLE}
    assert not result.rows()["included"].any()
    assert not result.failed


@pytest.mark.parametrize("donor", [-1.0, 1.0])
def test_a_model_that_will_not_pass_is_refused_before_it_is_measured(
    tmp_path: Path, probe: FakeProbe, donor: float
) -> None:
    seen = []
    probe.foreseen = lambda pair: seen.append(pair) or {"m_base": -1.0, "m_donor": donor}
    result = run(tmp_path)
    if donor > 0:
        assert {model.status for model in result.models.values()} == {Status.MEASURED}
        assert len(seen) == 4
        return
    red = result.models["red"]
    assert red.status is Status.NOT_APPLICABLE
    assert not probe.measured
    assert "50% of the unedited prompts" in red.reason
    assert "Refused after 8 of 20 pairs" in red.reason
    assert red.gate is not None
    assert red.gate.measured == 8
    assert {verdict.outcome for verdict in result.verdicts} == {Outcome.NOT_APPLICABLE}
    assert not len(result.rows())


def test_a_model_with_few_pairs_is_refused_as_the_gate_would_after_all_of_them(
    tmp_path: Path, probe: FakeProbe
) -> None:
    probe.foreseen = lambda pair: {"m_base": -1.0, "m_donor": -1.0}
    probe.change = lambda row: {**row, "m_base": -1.0, "m_donor": -1.0}
    few = {"task": {"name": "gated_decision", "size": 5}, "models": ["red"]}
    early = run(tmp_path / "early", few).models["red"]
    assert not probe.measured
    probe.foreseen = lambda pair: None
    late = run(tmp_path / "late", few).models["red"]
    assert probe.measured
    assert early.status is late.status is Status.NOT_APPLICABLE
    assert early.gate == late.gate


def test_a_doubtful_model_is_measured(tmp_path: Path, probe: FakeProbe) -> None:
    margins = iter([-1.0, *[1.0] * 7])
    probe.foreseen = lambda pair: {"m_base": -1.0, "m_donor": next(margins)}
    run(tmp_path, {"models": ["red"]})
    assert probe.measured


def test_a_model_whose_decisions_do_not_turn_is_judged_on_margins_and_every_word_says_so(
    tmp_path: Path, probe: FakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def effects(sample: Sample, asked: Any) -> Iterator[Effect]:
        yield from fake_effects(sample, asked)
        yield sample.rate("downstream.flip_rate", sample.rows["margin"] > 0)

    probe.change = lambda row: {**row, **{key: row[key] - 8 for key in ("m_base", "m_donor", "margin")}}
    probe.read_by = lambda: replace(FAKE_READING, effects=effects)  # type: ignore[method-assign]
    flips = {"id": "flips", "kind": "critique", "statement": "downstream.flip_rate > 0.5"}
    result = run(tmp_path, {"models": ["red"], "claims": [*CONFIG["claims"], flips]})
    red = result.models["red"]
    assert (red.status, red.margin_only) == (Status.MEASURED, True)
    assert {effect.metric for effect in red.effects} == {"recovery"}
    words = {verdict.claim: verdict.word for verdict in result.verdicts}
    assert words == {"local": "holds (margin only)", "rest": "fails (margin only)", "flips": "not applicable"}
    monkeypatch.setattr(judgement, "make_probe", lambda config: probe)
    again = judgement.judged_again(load_result(result.folder))
    assert {verdict.claim: verdict.word for verdict in again.verdicts} == words
    assert "margin only, no decision turns" in summary_markdown(result)


def test_exclusions_travel_with_every_effect(tmp_path: Path, probe: FakeProbe) -> None:
    probe.change = lambda row: {**row, "m_base": -0.001} if row["pair"] == 0 else row
    result = run(tmp_path, {"gate": {"oracle_accuracy": 0.5}})
    red = result.models["red"]
    assert red.gate is not None
    assert red.gate.undecided == red.gate.excluded == 5
    assert {effect.excluded for effect in red.effects} == {5}
    rows = result.rows()
    assert (~rows["included"]).sum() == 2 * 2 * 5


def test_pairs_that_do_not_align_are_counted(tmp_path: Path, probe: FakeProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runs_fakes.WordTokenizer.__call__
    first = next(iter(GatedDecision(size=20, split="all").prompt_pairs()))
    value = next(segment.text.strip() for segment in first.base.segments if segment.name == "field")

    def in_two(self: runs_fakes.WordTokenizer, text: str, **_: Any) -> dict[str, list[Any]]:
        found, ids, offsets = whole(self, text), list[int](), list[tuple[int, int]]()
        for token, (start, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
            split = text[start:end].strip() == value
            ids += [token, token + 1] if split else [token]
            self.words |= {token + 1: text[end - 1 : end]} if split else {}
            offsets += [(start, end - 1), (end - 1, end)] if split else [(start, end)]
        return {"input_ids": ids, "offset_mapping": offsets}

    monkeypatch.setattr(runs_fakes.WordTokenizer, "__call__", in_two)
    result = run(tmp_path)
    gate = result.models["red"].gate
    assert gate is not None
    assert gate.unaligned >= 1
    assert gate.measured == 20 - gate.unaligned
    assert f"{gate.unaligned} of 20 pairs do not align" in result.models["red"].reason


def test_no_pair_at_all_aligns(tmp_path: Path, probe: FakeProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    def misaligned(*_: Any, **__: Any) -> None:
        raise AlignmentError("The values differ in length: 'gold' is 1 token and 'silver' is 2.")

    monkeypatch.setattr("kvprobe.runs.preparation.align", misaligned)
    result = run(tmp_path)
    red = result.models["red"]
    assert red.status is Status.NOT_APPLICABLE
    assert red.reason.endswith(
        "aligns none of the 20 pairs. The values differ in length: 'gold' is 1 token and 'silver' is 2."
    )
    assert result.rows().empty
    assert load_result(result.folder) == result


def test_a_model_that_cannot_be_asked_is_not_measured(tmp_path: Path, probe: FakeProbe) -> None:
    probe.unable = "Its tokenizer cannot write this."
    result = run(tmp_path)
    red = result.models["red"]
    assert red.status is Status.NOT_APPLICABLE
    assert red.reason == "Its tokenizer cannot write this. Nothing was measured."
    assert probe.measured == []
    assert result.rows().empty
    assert load_result(result.folder) == result


def test_an_unaligned_prompt_of_ones_own_is_an_error(tmp_path: Path, probe: FakeProbe) -> None:
    prompt = tmp_path / "mine.yaml"
    prompt.write_text("name: mine\nprompt: 'The tier is {{gold|very silver}}.'\nanswers: {old: approve, new: reject}\n")
    with pytest.raises(AlignmentError, match="differ in length"):
        run(tmp_path / "results", {"task": {"name": "own_prompt", "files": [str(prompt)]}})


def test_all_model_names_are_looked_up_before_one_is_loaded(
    tmp_path: Path, probe: FakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "default_loader", lambda: load_subject)
    models = [str(tmp_path / "absent"), "no such model"]
    with pytest.raises(UnknownNameError, match="no such model"):
        run_experiment(config(models=models), results_dir=tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_task_without_pairs(tmp_path: Path, probe: FakeProbe) -> None:
    with pytest.raises(ConfigError, match="files is empty"):
        run(tmp_path, {"task": {"name": "own_prompt", "files": []}})


def test_wrong_task_names_and_parameters(tmp_path: Path, probe: FakeProbe) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'gated_decision'"):
        run(tmp_path, {"task": "gated_decisions"})
    with pytest.raises(ConfigError, match=r"'task.sise' is not a known key; did you mean 'size'"):
        run(tmp_path, {"task": {"name": "gated_decision", "sise": 3}})
    with pytest.raises(ConfigError, match=r"'statistics.cluster' is 'skelton', .* did you mean 'skeleton'"):
        run(tmp_path, {"statistics": {"cluster": "skelton"}})
    with pytest.raises(ConfigError, match=r"'task.size' is wrong"):
        run(tmp_path, {"task": {"name": "gated_decision", "size": "all"}})


def test_a_claim_about_nothing_measured(tmp_path: Path, probe: FakeProbe) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'field_only\.recovery'"):
        run(tmp_path, {"claims": [{"id": "c", "statement": "field_only.recovry < 1"}]})
    measured = len(probe.measured)
    run(tmp_path)  # mended: the first model, which told, is not measured again, and the second for the first time
    assert len(probe.measured) == 2 * measured


def test_rows_without_margins_cannot_be_gated(tmp_path: Path, probe: FakeProbe) -> None:
    probe.change = lambda row: {key: value for key, value in row.items() if key != "m_donor"}
    with pytest.raises(GateError, match="no column 'm_donor'"):
        run(tmp_path)


def test_a_results_folder_that_cannot_be_written(tmp_path: Path, probe: FakeProbe) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"^The results folder .* cannot be written \(.*\); choose another"):
        run(tmp_path / "file" / "results")


def test_progress_reaches_the_end_and_never_goes_back(tmp_path: Path, probe: FakeProbe) -> None:
    seen: list[events.Event] = []
    run(tmp_path, on_event=seen.append)
    fractions = [event.fraction for event in seen if isinstance(event, events.Progress)]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert isinstance(seen[1], events.RunStarted)
    assert isinstance(seen[-2], events.RunFinished)


def test_time_left_is_of_this_runs_own_pace() -> None:
    now, seen = [0.0], []
    tracker = Tracker(2, seen.append, clock=lambda: now[0])

    def tell(event: events.Event) -> events.Progress:
        tracker("unit", event)
        return seen[-1]

    tell(events.ModelReady("a", 10, 0, 10, 5))  # half of it is found in the store: no work
    now[0] = 3.0
    assert tell(events.CellAdvanced("a", 5, 0.0)).seconds_left is None
    advanced = tell(events.CellAdvanced("a", 5, 0.5))
    assert advanced.seconds_left == pytest.approx(3.0 / 0.05 * 1.45)
    finished = tell(events.CellFinished("a", 5, "key", 1, 1.0))
    assert finished.seconds_left == pytest.approx(3.0 / 0.1 * 1.4)
    assert finished.fraction == pytest.approx(0.3)
    assert tell(events.ModelFinished("a", "failed", "four cells are missing")).fraction == 0.5


def test_claims_changed_after_the_first_cell_say_what_they_were(tmp_path: Path, probe: FakeProbe) -> None:
    first, other = (dict(claim) for claim in runs_fakes.CONFIG["claims"])
    before = {"claims": [first, other]}
    run(tmp_path, before)
    assert not any(verdict.changed for verdict in load_result(run(tmp_path, before).folder).verdicts)
    weaker = {**first, "statement": "field_only.recovery > -5"}
    added = {"id": "added", "kind": "critique", "statement": "downstream.recovery > 0"}
    # Another choice of models is another folder, and the same cells.
    again = run(tmp_path, {"claims": [weaker, other, added], "models": ["blue", "red"]})
    told = {verdict.claim: verdict.changed for verdict in again.verdicts if verdict.model == "red"}
    assert told[other["id"]] == ""
    assert re.fullmatch(
        rf"changed \d{{4}}-\d\d-\d\d \d\d:\d\d, after the first cell was measured: was {first['statement']} \(holds\)",
        told[first["id"]],
    )
    assert told["added"].startswith("made ")
    assert load_result(again.folder).verdicts == again.verdicts
    (line,) = (line for line in explain(f"fake/red/{first['id']}", tmp_path).lines() if first["statement"] in line)
    assert "The claim was changed" in line
    assert "marked ‡" in summary_markdown(again)
    assert first["statement"] in summary_markdown(again)
    # One that is left out is judged all the same.
    without = run(tmp_path, {"claims": [first]})
    (gone,) = {verdict.changed for verdict in without.verdicts if verdict.claim == other["id"]}
    assert re.fullmatch(r"withdrawn \d{4}-\d\d-\d\d \d\d:\d\d, after the first cell was measured", gone)
    assert load_result(without.folder).verdicts == without.verdicts
    assert f"`{other['statement']}` ({gone})" in summary_markdown(without)
    assert f"The claim was {gone}." in "".join(explain(f"fake/red/{other['id']}", tmp_path).lines())
    outcomes = {(verdict.claim, verdict.model): verdict.outcome for verdict in without.verdicts}
    # Back to what it was, nothing is changed.
    back = run(tmp_path, before)
    assert outcomes == {(verdict.claim, verdict.model): verdict.outcome for verdict in back.verdicts}
    assert not any(verdict.changed for verdict in back.verdicts)
