"""Where models are loaded and cells computed: in this process by default, or on workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvprobe.errors import WorkerLostError
from kvprobe.tasks.pairs import Pair

Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Cell:
    """The unit of work: one model and one block of instances.

    Args:
        model: its name.
        block: number of the block within the model.
        first: index of its first pair among the model's aligned pairs.
        pairs: the aligned pairs of the block.
        key: hash of everything that determines the cell.
    """

    model: str
    block: int
    first: int
    pairs: tuple[Pair, ...]
    key: str


class Executor(Protocol):
    """Does what needs a loaded model, in any order and on any machine; results do not depend on which.

    Work may be pickled, and loads its model itself.
    """

    def do(self, work: Callable[[], Answer]) -> Answer:
        """What `work` returns or raises.

        Raises:
            WorkerLostError: nobody could do it.
        """
        ...

    def run(
        self, work: Callable[[Cell], Outcome], cells: Sequence[Cell]
    ) -> Iterator[tuple[Cell, Outcome | WorkerLostError]]:
        """Yield every cell with its outcome, or why it has none, as soon as it is there."""
        ...


class InProcessExecutor:
    """One cell after the other, in order, in this process."""

    def do(self, work: Callable[[], Answer]) -> Answer:
        """What `work` returns or raises."""
        return work()

    def run(self, work: Callable[[Cell], Outcome], cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Yield every cell with its outcome as soon as it is there."""
        for cell in cells:
            yield cell, work(cell)
