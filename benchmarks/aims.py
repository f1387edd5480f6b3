"""What the project wants to reach, and whether a run shows it."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.contestants.base import REFERENCE
from benchmarks.results import Aim, Report, SweepLine

MET, NOT_MET, UNKNOWN = "met", "not met", "not measured"
_MODEL, _TOKENS, _SECONDS = "smollm2-135m", 512, 15 * 60


def judge(report: Report) -> list[Aim]:
    """Every aim with its verdict."""
    return [
        _faster(report, "cache_clone", 10),
        _faster(report, "transformer_lens", 30),
        _moving(report),
        _compute_bound(report),
        _equal(report),
        _brief(report),
    ]


def _judged(text: str, met: bool | None, measured: str) -> Aim:
    return Aim(text=text, verdict=UNKNOWN if met is None else MET if met else NOT_MET, measured=measured)


def _faster(report: Report, contestant: str, times: int) -> Aim:
    text = f"{times} times faster than {contestant} in a 256-position sweep at {_TOKENS} tokens on {_MODEL}"
    for line in report.sweeps:
        here = (line.model, line.tokens, line.sweep, line.contestant) == (_MODEL, _TOKENS, "position", contestant)
        if here and line.rows == 256 and line.ratio:
            found = f"{line.ratio.median:.1f} ({line.ratio.low:.1f} to {line.ratio.high:.1f})"
            return _judged(text, line.ratio.median >= times and line.agrees, found)
    return _judged(text, None, "")


def _moving(report: Report) -> Aim:
    text = "re-rotation at half the speed of a plain copy of the same bytes, or more, at every size"
    moved = [line for line in report.moves if line.operation == "re-rotation"]
    if not moved:
        return _judged(text, None, "")
    worst = min(moved, key=lambda line: line.of_copy.median)
    found = f"{worst.of_copy.median:.2f} at worst ({worst.model}, {worst.tokens} entries)"
    return _judged(text, worst.of_copy.median >= 0.5, found)


def _compute_bound(report: Report) -> Aim:
    text = "sweeps that compute bounds at half the machine's matrix-multiply rate, or more"
    bound = [line for line in report.sweeps if _of_kvprobe(line) and line.bound == "compute" and line.of_limit]
    if not bound:
        return _judged(text, None, "no sweep was bound by compute")
    reached: Callable[[SweepLine], float] = lambda line: line.of_limit or 0.0  # noqa: E731
    worst, best = min(bound, key=reached), max(bound, key=reached)
    there = sum(reached(line) >= 0.5 for line in bound)
    found = f"{there} of {len(bound)}; {_told(best)} at best, {_told(worst)} at worst"
    return _judged(text, there == len(bound), found)


def _told(line: SweepLine) -> str:
    return f"{line.of_limit or 0:.2f} ({line.sweep}, {line.tokens} tokens, {line.model})"


def _equal(report: Report) -> Aim:
    text = "every contestant's results equal kvprobe's within the noise floor"
    compared = [line for line in report.sweeps if line.difference is not None and not _of_kvprobe(line)]
    if not compared:
        return _judged(text, None, "")
    wrong = report.disagreeing
    found = f"{len(compared)} comparisons, {len(wrong)} disagree or failed"
    return _judged(text, not wrong, found)


def _brief(report: Report) -> Aim:
    return _judged(
        "the whole table in under 15 minutes",
        report.seconds < _SECONDS if report.complete else None,
        f"{report.seconds / 60:.1f} minutes on {report.machine['threads']} threads",
    )


def _of_kvprobe(line: SweepLine) -> bool:
    return line.contestant == REFERENCE
