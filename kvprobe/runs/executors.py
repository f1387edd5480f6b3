"""Where cells are computed: in this process by default; a distributed executor has the same one method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvprobe.tasks.pairs import Pair

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
    """Computes cells, in any order and on any machine; results do not depend on which."""

    def run(self, work: Callable[[Cell], Outcome], cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Yield every cell with its outcome as soon as it is there."""
        ...


class InProcessExecutor:
    """One cell after the other, in order, in this process."""

    def run(self, work: Callable[[Cell], Outcome], cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Yield every cell with its outcome as soon as it is there."""
        for cell in cells:
            yield cell, work(cell)
