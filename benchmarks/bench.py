"""A run of the benchmarks: models, lengths and sweeps one after the other, everything written as it is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.aims import judge
from benchmarks.case import make_case
from benchmarks.contestants.base import CONTESTANTS, REFERENCE
from benchmarks.figure import draw
from benchmarks.machine import Rates, description, measure_rates
from benchmarks.moves import measure_first_tokens, measure_moves
from benchmarks.results import Report, SweepLine
from benchmarks.rounds import compete, enter, lines, spread
from benchmarks.settings import Settings
from benchmarks.sweeps import SWEEPS
from benchmarks.tables import markdown
from kvprobe.errors import StoreError
from kvprobe.figures.style import save_figure
from kvprobe.models.loader import load_subject
from kvprobe.models.subject import Subject
from kvprobe.runs.store import write_atomically

STEM = "bench"
ORDER = (REFERENCE, "cache_clone", "transformer_lens", "nnsight", "full_forward")
Watch = Callable[[str, float], None]
"""Told what is measured and which share of the run is done."""


def run_benchmarks(
    settings: Settings, folder: Path, watch: Watch, load: Callable[[str], Subject] = load_subject
) -> Report:
    """Measure everything, writing `bench.json` after each part and `bench.md` and the figure at the end.

    Raises:
        StoreError: the folder cannot be written.
        UnsupportedError, ModelSourceError: a model cannot be loaded or measured.
    """
    started = time.perf_counter()
    report = Report(machine=description(), settings=settings.model_dump(mode="json"))
    _write(report, folder)
    rates = [measure_rates(3)]
    done, total = 0, _parts(settings)

    def finished(seen: list[Rates]) -> None:
        nonlocal done
        done += 1
        rates.extend(seen)
        report.seconds = time.perf_counter() - started
        report.gflops = spread([rate.flops / 1e9 for rate in rates])
        report.memory_gb_per_s = spread([rate.memory / 1e9 for rate in rates])
        _write(report, folder)

    def tell(what: str) -> None:
        watch(what, done / total)

    for name in settings.models:
        tell(f"loading {name}")
        subject = load(name)
        for found, seen in _measured_sweeps(subject, settings, tell):
            report.sweeps += found
            finished(seen)
        if "move" in settings.parts:
            report.moves += measure_moves(subject, settings, tell)
            finished([])
        if "first_token" in settings.parts:
            report.first_tokens += measure_first_tokens(subject, settings, tell)
            finished([])
    report.complete = True
    report.seconds = time.perf_counter() - started
    report.aims = judge(report)
    _write(report, folder)
    _publish(report, folder)
    return report


def contestants() -> list[str]:
    """All registered contestants, kvprobe first."""
    known = CONTESTANTS.names()
    return [*(name for name in ORDER if name in known), *(name for name in known if name not in ORDER)]


def _measured_sweeps(
    subject: Subject, settings: Settings, tell: Callable[[str], None]
) -> Iterator[tuple[list[SweepLine], list[Rates]]]:
    sweeps = [name for name in SWEEPS if name in settings.parts]
    for tokens in settings.tokens if sweeps else ():
        tell(f"{subject.name}, preparing prompts of {tokens} tokens")
        case = make_case(subject, tokens)
        ready, absent = enter(case, contestants())
        for sweep in sweeps:
            rows = SWEEPS[sweep](case, settings.size)
            told = f"{subject.name}, {sweep} sweep, {tokens} tokens"
            turns, rates = compete(ready, rows, settings, lambda what, told=told: tell(f"{told}: {what}"))  # type: ignore[misc]
            about: dict[str, str | int] = {"model": subject.name, "tokens": tokens, "sweep": sweep}
            found = lines(turns, rows, case, rates, about)
            yield found + [_absent(name, why, len(rows), about) for name, why in absent.items()], rates


def _absent(name: str, why: str, rows: int, about: Mapping[str, str | int]) -> SweepLine:
    return SweepLine(**about, contestant=name, label=CONTESTANTS.get(name).label, rows=rows, note=why)


def _parts(settings: Settings) -> int:
    sweeps = sum(part in SWEEPS for part in settings.parts)
    others = len(settings.parts) - sweeps
    return max(1, len(settings.models) * (sweeps * len(settings.tokens) + others))


def _write(report: Report, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{STEM}.json", report.model_dump_json(indent=2).encode())
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be written ({error.strerror}); choose another folder with --results."
        ) from error


def _publish(report: Report, folder: Path) -> None:
    write_atomically(folder / f"{STEM}.md", markdown(report).encode())
    if any(line.ratio and line.contestant != REFERENCE for line in report.sweeps):
        save_figure(draw(report), folder / STEM, {"Title": "kvprobe benchmarks"})
