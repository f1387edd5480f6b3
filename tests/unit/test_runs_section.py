"""Sections: experiments that go on when one fails, processes that change no byte, claims judged together."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import section_fakes
import torch
from section_fakes import contents, experiment, group_is_gone, run

import kvprobe
from kvprobe.errors import OutOfMemoryError, UnknownNameError
from kvprobe.models import memory
from kvprobe.runs import SectionResult, events, provenance, run_section
from kvprobe.runs.capacity import limited_threads, possible_jobs, threads_of_each
from kvprobe.runs.claims import Claim, Outcome, adjust, judge
from kvprobe.runs.executors import LOST
from kvprobe.runs.results import Status
from kvprobe.runs.section import in_order, section_name, sections_of
from kvprobe.runs.subjects import SubjectCache
from kvprobe.stats import Effect, Label, proportion
from kvprobe.stats.comparisons import adjust_holm


@pytest.fixture(autouse=True)
def _fixed_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("source_hash", "code_version"):
        monkeypatch.setattr(provenance, name, getattr(provenance, name))
    section_fakes.fix_provenance()


def logged(results: Path, what: str) -> list[str]:
    """The cells of which the run logs tell `what`."""
    lines = [line for log in results.rglob("log.jsonl") for line in log.read_text().splitlines()]
    return [entry["cell"] for entry in map(json.loads, lines) if entry["event"] == what]


def test_an_experiment_that_fails_leaves_the_others(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    configs = [
        experiment("bug", parameters={"error": "out of luck"}),
        experiment("claim", claims=[{"id": "c", "statement": "field_onyl.recovery < 1"}]),
        experiment("good"),
        experiment("probe", probe="test_blcks"),
    ]
    section = run(tmp_path, configs, 1, on_event=seen.append)
    assert [result.config.name for result in section.results] == ["good"]
    failures = {failure.experiment: failure for failure in section.failures}
    assert set(failures) == {"bug", "claim", "probe"}
    assert failures["bug"].message == "RuntimeError: out of luck"
    assert "_go_wrong" in failures["bug"].details
    assert "did you mean 'field_only.recovery'" in failures["claim"].message
    assert "did you mean 'test_blocks'" in failures["probe"].message
    assert not failures["probe"].details
    assert section.failed
    told = {event.experiment: event.failure for event in seen if isinstance(event, events.ExperimentFinished)}
    assert told == {"good": ""} | {name: failure.message for name, failure in failures.items()}
    fractions = [event.fraction for event in seen if isinstance(event, events.Progress)]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_models_stay_loaded_from_one_experiment_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        return load_fake(name)

    load_fake = section_fakes.load_subject
    monkeypatch.setattr(section_fakes, "load_subject", load)
    run(tmp_path, [experiment("one"), experiment("two")], 1)
    assert loaded == ["red", "blue"]


def test_processes_change_no_byte_and_a_killed_one_loses_nothing(tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    # Its worker dies after the other's: one that is ended with the pool before it died would die in its second try.
    later = {"kill": str(tmp_path / "more"), "times": 9, "after": str(deaths)}
    configs = [
        experiment("blocks", parameters={"kill": str(deaths)}),
        experiment("doomed", models=["blue", "red"], parameters=later, block_size=12),
        experiment("together", probe="test_together"),
    ]
    deaths.write_text("x")  # nothing dies in this process
    whole = run(tmp_path / "whole", [configs[0], configs[2]], 1)
    deaths.unlink()
    seen: list[events.Event] = []
    parts = run(tmp_path / "parts", configs, 2, on_event=seen.append)
    assert deaths.exists()
    blocks, doomed, together = parts.results
    assert [blocks.verdicts, together.verdicts] == [result.verdicts for result in whole.results]
    assert doomed.models["red"].status is Status.MEASURED
    assert doomed.models["blue"].status is Status.FAILED
    assert doomed.models["blue"].failures == (f"Block 0: {LOST}",)
    for name in ("blocks", "together"):
        assert contents(tmp_path / "parts" / name) == contents(tmp_path / "whole" / name)
    measured = logged(tmp_path / "parts", "cell")
    assert len(measured) == len(set(measured)) == 3 + 3 + 1 + 2
    assert [event.jobs for event in seen if isinstance(event, events.SectionStarted)] == [2]
    assert [event.fraction for event in seen if isinstance(event, events.Progress)][-1] == 1.0


def start(results: Path, seconds: float = 0.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, section_fakes.__file__, str(results), "2"]
    environment = {
        **os.environ,
        section_fakes.PAUSE: str(seconds),
        "PYTHONPATH": str(Path(kvprobe.__file__).parents[1]),
    }
    return subprocess.Popen(command, env=environment, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_stopped_with_its_workers_it_goes_on_to_the_same_bytes(tmp_path: Path, sent: signal.Signals) -> None:
    with start(tmp_path / "whole") as whole:
        pass
    assert whole.returncode == 0
    cut = start(tmp_path / "cut", 0.5)
    deadline = time.monotonic() + 200
    while len(logged(tmp_path / "cut", "cell")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    if sent is signal.SIGINT:
        os.killpg(cut.pid, sent)  # as a terminal does
    else:
        cut.send_signal(sent)
    assert cut.wait(60) == (130 if sent is signal.SIGINT else -signal.SIGKILL)
    assert group_is_gone(cut.pid, 60)
    assert not list((tmp_path / "cut").rglob("summary.json"))
    with start(tmp_path / "cut") as rest:
        pass
    assert rest.returncode == 0
    measured = logged(tmp_path / "cut", "cell")
    assert len(measured) == len(set(measured)) == 12
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_ctrl_c_in_this_process_says_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(section_fakes.Blocks, "_go_wrong", interrupted)
    seen: list[events.Event] = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [experiment("one"), experiment("two")], 1, on_event=seen.append)
    assert seen[-1] == events.RunInterrupted(3, 12)


def test_unknown_models_are_told_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no such model"):
        run_section([experiment("one", models=["no such model"])], results_dir=tmp_path / "results")
    assert not (tmp_path / "results").exists()


class _Subject(SimpleNamespace):
    """Can be referred to weakly, which a plain SimpleNamespace cannot."""

    __hash__ = object.__hash__


class _Loader:
    """Loads models of ten bytes as long as there are fewer than `room`."""

    def __init__(self, room: int) -> None:
        self.loaded: list[str] = []
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.room = room

    def __call__(self, name: str) -> Any:
        gc.collect()
        if len(self.alive) >= self.room:
            raise OutOfMemoryError("No room.")
        self.loaded.append(name)
        identity = SimpleNamespace(parameters=10)
        subject = _Subject(name=name, identity=identity, device=torch.device("cpu"), dtype=torch.int8)
        self.alive.add(subject)
        return subject


@pytest.mark.parametrize(
    ("free", "room", "keep", "loads"),
    [
        (10_000, 9, 8, "abc"),
        (None, 9, 8, "abc"),
        (10_000, 9, 2, "abca"),
        (65, 9, 8, "abca"),
        (50, 9, 8, "abcac"),
        (0, 9, 8, "abcac"),
        (10_000, 1, 8, "abcac"),
    ],
)
def test_models_are_kept_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, free: int | None, room: int, keep: int, loads: str
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    load = _Loader(room)
    cache = SubjectCache(load, keep)
    assert "".join(cache(name).name for name in "abcac") == "abcac"
    assert "".join(load.loaded) == loads


def test_what_does_not_fit_even_alone_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError):
        SubjectCache(_Loader(0))("a")


def test_jobs_follow_cores_models_memory_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("kvprobe.runs.capacity.cores", lambda: 4)
    monkeypatch.setattr("kvprobe.runs.capacity.available_bytes", lambda device: 100e9)
    assert possible_jobs(["smollm2-135m"] * 9) == 4
    assert possible_jobs(["smollm2-135m"] * 2) == 2
    assert possible_jobs(["smollm2-135m", "qwen3-8b"] * 4) == 2
    monkeypatch.setattr("kvprobe.runs.capacity.available_bytes", lambda device: 1e9)
    assert possible_jobs(["smollm2-135m"] * 9) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("kvprobe.runs.capacity.available_bytes", lambda device: 100e9)
    assert possible_jobs(["smollm2-135m"] * 9) == 1


def test_threads_are_a_share_of_the_cores_and_never_more_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprobe.runs.capacity.cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert [threads_of_each(jobs) for jobs in (1, 2, 4, 8, 16)] == [4, 4, 2, 1, 1]


def test_threads_are_limited_inside_the_block_only() -> None:
    before = torch.get_num_threads()
    with limited_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_order_and_names_of_sections() -> None:
    configs = [experiment("b", "3.10"), experiment("z", "3.2"), experiment("a", "3.10"), experiment("c", "2")]
    assert [config.name for config in in_order(configs)] == ["c", "z", "a", "b"]
    assert section_name(configs) == "experiments"
    assert section_name(configs[:3]) == "section3"
    assert section_name([experiment("a", "")]) == "experiments"


def effect(p_distance: float) -> Effect:
    extra = {"standard_error": 1.0, "degrees_of_freedom": 50.0}
    low, high = p_distance - 2.0086, p_distance + 2.0086
    return Effect(Label.of("x.y"), p_distance, low, high, 51, 51, extra=extra)


def test_the_registry_adjusts_headlines_over_all_experiments(tmp_path: Path) -> None:
    claim = Claim(id="c", statement="x.y > 0", headline=True)
    section = run(tmp_path, [experiment("one"), experiment("two")], 1)
    distances = {"one": [2.1, 5.0], "two": [2.2, 9.0]}
    results = tuple(
        replace(
            result,
            verdicts=tuple(adjust([judge(claim, "m", [effect(d)]) for d in distances[result.config.name]])),
        )
        for result in section.results
    )
    registry = [verdict for _, verdict in SectionResult("section3", results).verdicts()]
    p = [verdict.p_value for verdict in registry]
    assert [verdict.p_holm for verdict in registry] == adjust_holm([value or 0.0 for value in p])
    assert {verdict.outcome for verdict in registry} == {Outcome.HOLDS}
    # Each is decided by its own interval, and two of them only because nothing else was asked.
    assert [verdict.survives for verdict in registry] == [False, True, False, True]
    assert sections_of(results) == [SectionResult("section3", results)]


def test_the_false_discovery_rate_is_the_experiments_own() -> None:
    verdicts = [judge(Claim(id="c", statement="x.y > 0"), "m", [effect(2.1)])]
    assert adjust(verdicts)[0].survives
    assert not adjust(verdicts, 0.01)[0].survives


@pytest.mark.parametrize(("right", "boundary"), [(18, 0.5), (11, 0.5), (30, 0.9), (20, 0.3)])
def test_the_p_of_a_share_agrees_with_its_interval(right: int, boundary: float) -> None:
    share = proportion("x.y", [True] * right + [False] * (30 - right))
    verdict = judge(Claim(id="c", statement=f"x.y > {boundary}"), "m", [share])
    assert verdict.p_value is not None
    assert (verdict.p_value < 0.05) == (verdict.outcome is not Outcome.OPEN)
    assert judge(Claim(id="c", statement="x.y > 0"), "m", [share]).p_value is None
