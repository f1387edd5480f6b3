"""Contestants taking turns, so that a machine that speeds up or slows down does so for all of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.contestants.base import CONTESTANTS, REFERENCE, Contestant
from benchmarks.machine import Rates, measure_rates, median_rates
from benchmarks.results import Spread, SweepLine
from benchmarks.settings import Settings
from benchmarks.sweeps import Row
from kvprobe.errors import UnsupportedError

Tell = Callable[[str], None]


@dataclass(eq=False)
class Turn:
    """A contestant and what it has measured so far.

    Attributes:
        per_round: rows it runs in each round.
        seconds: by round, of a whole sweep.
        margins: by number of the row.
        broken: why it stopped.
    """

    contestant: Contestant
    per_round: int = 1
    seconds: list[float] = field(default_factory=list)
    margins: dict[int, float] = field(default_factory=dict)
    broken: str = ""


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75)).tolist()
    return Spread(median=middle, low=low, high=high)


def enter(case: Case, names: Sequence[str]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Contestants ready to run on the case, and why others cannot."""
    ready: dict[str, Contestant] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            ready[name] = CONTESTANTS.get(name)(case)
        except ImportError as error:
            absent[name] = f"not installed: {error}"
        except UnsupportedError as error:
            absent[name] = f"not possible: {error}"
    return ready, absent


def compete(
    ready: Mapping[str, Contestant], rows: Sequence[Row], settings: Settings, tell: Tell
) -> tuple[dict[str, Turn], list[Rates]]:
    """Run a sweep by all contestants in turn, again and again; the slower ones run a part of it."""
    turns = {name: Turn(contestant) for name, contestant in ready.items()}
    tell("warming up")
    pool = _pool(turns[REFERENCE], rows, settings)
    rates = [measure_rates()]
    for turn in turns.values():
        _take(turn, rows, pool, 0)
    others = [turn.seconds[0] / len(rows) for turn in turns.values() if turn.seconds and not _ours(turn)]
    slow = max(others, default=0.0) > settings.slow_seconds
    for turn in turns.values():
        if not _ours(turn) and turn.seconds:
            turn.per_round = max(1, min(len(pool), int(settings.share_seconds * len(rows) / turn.seconds[0])))
        if not slow:
            turn.seconds.clear()
    # Where a patch takes seconds, a first run is as good as any.
    for number in range(1, settings.slow_rounds if slow else settings.rounds + 1):
        # There and back, so that nobody always runs after the same one.
        names = list(turns) if number % 2 else list(turns)[::-1]
        rates.append(measure_rates())
        for name in names:
            tell(f"round {number}, {turns[name].contestant.label}")
            _take(turns[name], rows, pool, number)
    return turns, rates


def lines(
    turns: Mapping[str, Turn], rows: Sequence[Row], case: Case, rates: Sequence[Rates], about: Mapping[str, str | int]
) -> list[SweepLine]:
    """One line for each contestant."""
    ours, machine = turns[REFERENCE], median_rates(list(rates))
    unpatched = float(case.margins(_unpatched(case)))
    found = []
    for name, turn in turns.items():
        line = SweepLine(**about, contestant=name, label=turn.contestant.label, rows=len(rows), measured=turn.per_round)
        if turn.broken:
            line.note = turn.broken
        else:
            work = turn.contestant.work(rows)
            compared = sorted(turn.margins)
            line.rounds, line.compared = len(turn.seconds), len(compared)
            line.seconds = spread(turn.seconds)
            line.ratio = spread([theirs / mine for theirs, mine in zip(turn.seconds, ours.seconds, strict=True)])
            line.of_limit, line.bound = work.shortest(machine) / line.seconds.median, work.bound(machine)
            line.difference = max(abs(turn.margins[row] - ours.margins[row]) for row in compared)
            line.tolerance = case.tolerance
            line.effect = max(abs(ours.margins[row] - unpatched) for row in compared)
        found.append(line)
    return found


def _unpatched(case: Case) -> Tensor:
    from kvprobe.engine.sweep import run_patches

    return run_patches(case.subject, case.base_ids, case.base, [()])[0]


def _pool(ours: Turn, rows: Sequence[Row], settings: Settings) -> list[int]:
    """The rows that kvprobe runs in every round, and that the others draw from: all, if that does not take too long."""
    order: list[int] = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    probe = order[: settings.least_rows]
    _timed(ours, rows, probe)
    seconds = _timed(ours, rows, probe) / len(probe)
    ours.per_round = min(len(rows), max(len(probe), int(settings.own_seconds / seconds)))
    return order[: ours.per_round]


def _ours(turn: Turn) -> bool:
    return turn.contestant.name == REFERENCE


def _take(turn: Turn, rows: Sequence[Row], pool: Sequence[int], number: int) -> None:
    """One round of one contestant: other rows each time, so that more of them are compared."""
    if turn.broken:
        return
    start = number * turn.per_round
    chosen = sorted(pool[(start + place) % len(pool)] for place in range(turn.per_round))
    try:
        turn.seconds.append(_timed(turn, rows, chosen) * len(rows) / len(chosen))
    except Exception as error:
        if _ours(turn):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        turn.broken = f"failed: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"


def _timed(turn: Turn, rows: Sequence[Row], chosen: Sequence[int]) -> float:
    started = time.perf_counter()
    margins = turn.contestant.run([rows[number] for number in chosen])
    seconds = time.perf_counter() - started
    turn.margins |= dict(zip(chosen, margins.tolist(), strict=True))
    return seconds
