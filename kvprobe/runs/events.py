"""What a run tells whoever watches it; the CLI draws these, library code never prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Base of all events."""


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
    """A model is loaded and its pairs are aligned: `cells` cells, `finished` of them already in the store."""

    model: str
    pairs: int
    unaligned: int
    cells: int
    finished: int


@dataclass(frozen=True)
class Progress(Event):
    """Work moved on.

    Args:
        fraction: of the whole run, 0 to 1.
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


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of who does not watch."""


@dataclass
class Pace:
    """How far a run is and how long it will take.

    Cells found in the store count as done but not as work, so that a resumed run's estimate is its own.
    """

    total: float
    clock: Callable[[], float] = time.monotonic
    done: float = 0.0
    worked: float = 0.0
    busy: float = 0.0
    _since: float | None = field(default=None)

    def skip(self, cells: float) -> None:
        """`cells` cells need no work."""
        self.done += cells

    def begin(self) -> None:
        """A cell begins."""
        self._since = self.clock()

    def end(self, cells: float = 1.0) -> float:
        """The cell that began is over. Returns its seconds."""
        seconds = self.clock() - self._since if self._since is not None else 0.0
        self._since = None
        self.done += cells
        self.worked += cells
        self.busy += seconds
        return seconds

    def fraction(self, part: float = 0.0) -> float:
        """Share of the run that is done when `part` of the present cell is."""
        return min(1.0, (self.done + part) / self.total) if self.total else 1.0

    def seconds_left(self, part: float = 0.0) -> float | None:
        """Estimated seconds to the end when `part` of the present cell is done."""
        busy = self.busy + (self.clock() - self._since if self._since is not None else 0.0)
        worked = self.worked + part
        if worked <= 0:
            return None
        return busy / worked * max(0.0, self.total - self.done - part)
