"""What a run tells whoever watches it; the CLI draws these, library code never prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True)
class SectionStarted(Event):
    """`experiments` experiments begin, their models in `jobs` processes; `section` is what they are called together."""

    section: str
    experiments: int
    jobs: int


@dataclass(frozen=True)
class RunStarted(Event):
    """A run begins: `models` models of `pairs` pairs each, at most `cells` cells, results in `folder`."""

    experiment: str
    hash: str
    folder: str
    models: int
    pairs: int
    cells: int


@dataclass(frozen=True)
class ModelStarted(Event):
    """A model is about to be loaded (`number` of `models`)."""

    model: str
    number: int
    models: int


@dataclass(frozen=True)
class ModelReady(Event):
    """A model is loaded and its pairs are aligned: `cells` cells, `finished` of them already in the store.

    `peak_bytes` is what the planner foresees for weights, caches and passes at their largest, where it knows.
    """

    model: str
    pairs: int
    unaligned: int
    cells: int
    finished: int
    peak_bytes: int | None = None


@dataclass(frozen=True)
class CellAdvanced(Event):
    """`part` of a cell (0 to 1) is measured; `Tracker` makes a `Progress` of it."""

    model: str
    block: int
    part: float


@dataclass(frozen=True)
class Progress(Event):
    """Work moved on.

    Args:
        fraction: of the whole, 0 to 1.
        seconds_left: estimated from this run's own pace; `None` until something was measured.
    """

    model: str
    block: int
    fraction: float
    seconds_left: float | None


@dataclass(frozen=True)
class CellFinished(Event):
    """A cell was measured and written."""

    model: str
    block: int
    key: str
    rows: int
    seconds: float


@dataclass(frozen=True)
class CellFailed(Event):
    """A cell could not be measured; the others are kept. `message` is one sentence."""

    model: str
    block: int
    message: str


@dataclass(frozen=True)
class Warned(Event):
    """Something the user should know, in one sentence, such as a damaged cell that is measured again."""

    message: str


@dataclass(frozen=True)
class ModelFinished(Event):
    """A model is done; `message` sums up its gate and attrition in one sentence."""

    model: str
    status: str
    message: str


@dataclass(frozen=True)
class RunInterrupted(Event):
    """Ctrl-C: `finished` cells are kept and the same command goes on from there."""

    finished: int
    cells: int


@dataclass(frozen=True)
class RunFinished(Event):
    """The run is complete."""

    folder: str
    seconds: float


@dataclass(frozen=True)
class ExperimentFinished(Event):
    """One of several experiments is over, the `number`-th of `experiments`.

    Args:
        seconds: its models took, added up.
        failure: the one sentence why it has no result; empty when it has one.
    """

    experiment: str
    number: int
    experiments: int
    seconds: float
    failure: str = ""


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of who does not watch."""


@dataclass(frozen=True)
class HereOnly:
    """A listener in this process, whose copies in other processes hear nothing."""

    listener: Listener

    def __call__(self, event: Event) -> None:
        """Hand the event on."""
        self.listener(event)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (ignore,)


@dataclass
class _Unit:
    """A model of an experiment: its cells, how many were found, and the measured part of the others by block."""

    cells: int = 1
    found: int = 0
    parts: dict[int, float] = field(default_factory=dict)
    over: bool = False

    @property
    def measured(self) -> float:
        """Share that was measured now."""
        return sum(self.parts.values()) / self.cells

    @property
    def done(self) -> float:
        """Share that is done."""
        # Nothing is left to do of a model that failed, nor of one without cells.
        return 1.0 if self.over else self.found / self.cells + self.measured


class Tracker:
    """Hands all events on and adds how far the whole is; each model of each experiment is a unit of equal size.

    Args:
        units: how many there are.
        listener: who is told.
        clock: in seconds.
    """

    def __init__(self, units: int, listener: Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self.finished = 0
        self._listener = listener
        self._clock, self._began = clock, clock()
        self._count = units
        self._units: dict[Hashable, _Unit] = {}

    def __call__(self, unit: Hashable, event: Event) -> None:
        """Take in an event of a unit."""
        of_model = self._units.setdefault(unit, _Unit())
        match event:
            case CellAdvanced():
                of_model.parts[event.block] = max(event.part, of_model.parts.get(event.block, 0.0))
            case ModelReady():
                of_model.cells, of_model.found = max(1, event.cells), event.finished
                self.finished += event.finished
            case CellFinished() | CellFailed():
                self.finished += isinstance(event, CellFinished)
                of_model.parts[event.block] = 1.0
            case ModelFinished():
                of_model.over = True
        if not isinstance(event, CellAdvanced):
            self._listener(event)
        match event:
            case CellAdvanced() | CellFinished() | CellFailed():
                self._tell(event.model, event.block)
            case ModelFinished():
                self._tell(event.model, 0)

    def _tell(self, model: str, block: int) -> None:
        done = sum(unit.done for unit in self._units.values())
        # What was found in the store is no work, so that the estimate of a resumed run is its own.
        measured = sum(unit.measured for unit in self._units.values())
        left = (self._clock() - self._began) / measured * max(0.0, self._count - done) if measured else None
        self._listener(Progress(model, block, min(1.0, done / self._count), left))
