"""What a run tells whoever watches it; the CLI draws these, library code never prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


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


class Pace:
    """How far the work is and how long it will take.

    What is found in the store counts as done but not as work, so that a resumed run's estimate is its own.

    Args:
        total: all the work, in any unit.
        clock: in seconds.
    """

    def __init__(self, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.done = self.worked = 0.0
        self._clock = clock
        self._began = clock()

    def skip(self, amount: float) -> None:
        """`amount` needs no work."""
        self.done += amount

    def work(self, amount: float) -> None:
        """`amount` was worked off."""
        self.done += amount
        self.worked += amount

    def fraction(self, part: float = 0.0) -> float:
        """Share of the whole that is done when `part` of the present work is too."""
        return min(1.0, (self.done + part) / self.total) if self.total else 1.0

    def seconds_left(self, part: float = 0.0) -> float | None:
        """Estimated seconds to the end when `part` of the present work is done too."""
        worked = self.worked + part
        if worked <= 0:
            return None
        return (self._clock() - self._began) / worked * max(0.0, self.total - self.done - part)


@dataclass
class _UnderWay:
    """Cells of a model, and how many of them are done."""

    cells: int = 1
    done: int = 0


class Tracker:
    """Hands all events on and adds how far the whole is; each model of each experiment is one unit of work.

    Several models may be under way at once, but no model in two experiments.

    Args:
        models: of all experiments; one that is in several counts in each.
        listener: who is told.
    """

    def __init__(self, models: int, listener: Listener) -> None:
        self.finished = 0
        self._pace = Pace(models)
        self._listener = listener
        self._over = 0
        self._under_way: dict[str, _UnderWay] = {}

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case CellAdvanced():
                self._tell(event.model, event.block, event.part / self._under_way[event.model].cells)
                return
            case ModelStarted():
                self._under_way[event.model] = _UnderWay()
            case ModelReady():
                self._under_way[event.model] = _UnderWay(max(1, event.cells), event.finished)
                self.finished += event.finished
                self._pace.skip(event.finished / max(1, event.cells))
            case CellFinished() | CellFailed():
                self.finished += isinstance(event, CellFinished)
                of_model = self._under_way[event.model]
                of_model.done += 1
                self._pace.work(1 / of_model.cells)
            case ModelFinished():
                # Nothing is left to do of a model that failed, nor of one without cells.
                self._under_way.pop(event.model, None)
                self._over += 1
                parts = sum(model.done / model.cells for model in self._under_way.values())
                self._pace.done = max(self._pace.done, self._over + parts)
        self._listener(event)
        match event:
            case CellFinished() | CellFailed():
                self._tell(event.model, event.block)
            case ModelFinished():
                self._tell(event.model, 0)

    def _tell(self, model: str, block: int, part: float = 0.0) -> None:
        self._listener(Progress(model, block, self._pace.fraction(part), self._pace.seconds_left(part)))
