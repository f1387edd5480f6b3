"""The benchmarks compare equals: every contestant gives the same margins, and a wrong one is found out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_models import tiny
from torch import Tensor

from benchmarks import machine
from benchmarks.aims import judge
from benchmarks.bench import contestants, run_benchmarks
from benchmarks.case import Case, make_case
from benchmarks.contestants.base import CONTESTANTS, REFERENCE, Contestant
from benchmarks.results import MoveLine, Report, Spread, SweepLine
from benchmarks.rounds import Turn, compete, enter, lines, spread
from benchmarks.settings import QUICK
from benchmarks.sweeps import SWEEPS, Size
from benchmarks.tables import markdown, terminal
from benchmarks.work import Work, prompt_work, shared_work
from kvprobe.engine.sweep import run_patches
from kvprobe.models.subject import Subject

TINY = QUICK.model_copy(
    update={
        "models": ("llama",),
        "tokens": (16,),
        "size": Size(positions=5, suffixes=2),
        "rounds": 2,
        "share_seconds": 0.001,
        "move_tokens": (8,),
        "move_rounds": 2,
        "first_tokens": (8,),
    }
)


@pytest.fixture(autouse=True, scope="module")
def _small_measure_of_the_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_SIDE", 64)
        patch.setattr(machine, "_BYTES", 2**16)
        machine._operands.cache_clear()
        yield
    machine._operands.cache_clear()


def bench_subject(name: str) -> Subject:
    subject = tiny(name)
    # Random ids are drawn from the tokens of the model where there is no tokenizer.
    return replace(subject, name=name)


@cache
def case_of(name: str) -> Case:
    return make_case(bench_subject(name), 16)


@pytest.mark.parametrize("contestant", [name for name in contestants() if name != REFERENCE])
@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_contestants_give_the_margins_of_kvprobe(name: str, sweep: str, contestant: str) -> None:
    if contestant == "nnsight" and importlib.util.find_spec("nnsight") is None:
        pytest.skip("nnsight is in the extra 'bench'")
    case = case_of(name)
    rows = SWEEPS[sweep](case, TINY.size)
    ours, theirs = (CONTESTANTS.get(which)(case).run(rows) for which in (REFERENCE, contestant))
    unpatched = case.margins(run_patches(case.subject, case.base_ids, case.base, [()])[0])
    assert float((ours - theirs).abs().max()) <= case.tolerance < 1e-3
    assert float((ours - unpatched).abs().max()) > 100 * case.tolerance


def test_a_contestant_that_disagrees_or_breaks_fails_the_run() -> None:
    case = case_of("llama")
    ready, absent = enter(case, [REFERENCE, "cache_clone", "full_forward"])
    assert not absent

    def wrong(rows: object) -> Tensor:
        return torch.zeros(len(rows))  # type: ignore[arg-type]

    def broken(rows: object) -> Tensor:
        raise RuntimeError("out of luck")

    ready["cache_clone"].run = wrong  # type: ignore[method-assign]
    ready["full_forward"].run = broken  # type: ignore[method-assign]
    rows = SWEEPS["position"](case, TINY.size)
    turns, rates = compete(ready, rows, TINY, lambda what: None)
    found = lines(turns, rows, case, rates, {"model": "llama", "tokens": 16, "sweep": "position"})
    report = Report(machine={"threads": 1}, settings={}, sweeps=found)
    assert {line.contestant for line in report.disagreeing} == {"cache_clone", "full_forward"}
    assert "out of luck" in next(line.note for line in found if line.contestant == "full_forward")
    assert next(aim for aim in judge(report) if "equal" in aim.text).verdict == "not met"


def test_a_library_that_is_not_there_is_a_line_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Contestant, case: Case) -> None:
        raise ImportError("No module named 'nnsight'")

    monkeypatch.setattr(CONTESTANTS.get("nnsight"), "__init__", absent)
    ready, why = enter(case_of("llama"), [REFERENCE, "nnsight"])
    assert list(ready) == [REFERENCE]
    assert "No module named" in why["nnsight"]


def test_a_whole_run_writes_tables_and_figure(tmp_path: Path) -> None:
    shares: list[float] = []
    report = run_benchmarks(TINY, tmp_path, lambda what, share: shares.append(share), load=bench_subject)
    assert report.complete
    assert shares == sorted(shares)
    assert {line.sweep for line in report.sweeps} == set(SWEEPS)
    assert not report.disagreeing
    assert Report.model_validate_json((tmp_path / "bench.json").read_text()) == report
    assert (tmp_path / "bench.png").stat().st_size > 1000
    text = StringIO()
    Console(file=text, width=200).print(terminal(report))
    for shown in ("TransformerLens", "re-rotation", "Time to the first token", "not measured"):
        assert shown in text.getvalue()
        assert shown in markdown(report)


def test_seconds_of_a_part_are_extrapolated_to_the_sweep() -> None:
    turn = Turn(CONTESTANTS.get("full_forward")(case_of("llama")))
    from benchmarks.rounds import _take

    rows = SWEEPS["position"](case_of("llama"), TINY.size)
    _take(turn, rows, [3, 1], 0)
    assert set(turn.margins) == {3}
    _take(turn, rows, [3, 1], 1)
    assert set(turn.margins) == {3, 1}
    assert len(turn.seconds) == 2


def test_sharing_needs_less_work_than_whole_prompts() -> None:
    case = case_of("llama")
    shared, whole = shared_work(case, 10, 1, 1), prompt_work(case).times(10)
    assert 0 < shared.flops < whole.flops
    assert 0 < shared.nbytes < whole.nbytes
    assert (Work(2, 3).times(2) + Work(1, 1)) == Work(5, 7)


def test_aims_are_judged_from_the_lines() -> None:
    def line(contestant: str, ratio: float) -> SweepLine:
        fast = Spread(median=ratio, low=ratio, high=ratio)
        about = {"model": "smollm2-135m", "tokens": 512, "sweep": "position", "contestant": contestant}
        return SweepLine(**about, label=contestant, rows=256, ratio=fast, difference=0.0, tolerance=1.0)  # type: ignore[arg-type]

    moved = MoveLine(
        model="m", tokens=1, operation="re-rotation", nbytes=1, rounds=1, seconds=spread([1.0]), rate=1.0,
        copy_rate=1.0, of_copy=spread([0.4]), of_limit=0.1,
    )  # fmt: skip
    report = Report(
        machine={"threads": 2},
        settings={},
        sweeps=[line("cache_clone", 11.0), line("transformer_lens", 29.0)],
        moves=[moved],
    )
    verdicts = [aim.verdict for aim in judge(report)]
    assert verdicts == ["met", "not met", "not met", "not measured", "met", "not measured"]
