"""Sets of token positions, in whatever form a caller has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class HasPositions(Protocol):
    """Anything that names its positions, such as `kvprobe.tasks.context.Span`."""

    @property
    def positions(self) -> Iterable[int]:
        """The positions."""


Positions = Iterable[int] | HasPositions


def as_positions(positions: Positions) -> tuple[int, ...]:
    """Positions as a tuple, in the order given."""
    if isinstance(positions, Iterable):
        return tuple(int(position) for position in positions)
    return tuple(int(position) for position in positions.positions)
