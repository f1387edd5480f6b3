"""Sets of cache positions to act on together: the strongest of a ranking, and random sets to compare them with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvprobe.probes.kit.ranking import Ranking

Selection = Literal["in_sample", "held_out", "matched", "random"]


@dataclass(frozen=True)
class PositionSet:
    """Positions that are acted on together.

    Attributes:
        selection: how they were chosen.
        size: how many they are.
        draw: which of several random sets.
        positions: of the prompt.
    """

    selection: Selection
    size: int
    draw: int
    positions: tuple[int, ...]

    @property
    def name(self) -> str:
        """`held_out_8`."""
        return f"{self.selection}_{self.size}"


def position_sets(
    ranking: Ranking,
    sizes: Sequence[int],
    draws: Mapping[Selection, int],
    generator: np.random.Generator,
    delimiters: AbstractSet[int] = frozenset(),
) -> Iterator[PositionSet]:
    """For every size that the ranked positions allow, the sets of every selection.

    Args:
        ranking: of all positions that may be chosen.
        sizes: numbers of positions.
        draws: how many sets each selection has, in the order in which they are made: one of the strongest positions
            (`in_sample`, `held_out`), any number at random (`matched` to those held out, `random`).
        generator: of the draws.
        delimiters: positions whose token is only punctuation or white space, to match.
    """
    pool, in_sample, held_out = sorted(ranking.scores), ranking.in_sample, ranking.held_out
    for size in (size for size in sizes if size <= len(pool)):
        for selection, count in draws.items():
            if selection == "matched":
                drawn = matched_sets(held_out[:size], pool, delimiters, count, generator)
            elif selection == "random":
                drawn = random_sets(pool, size, count, generator)
            else:
                drawn = [tuple((in_sample if selection == "in_sample" else held_out)[:size])]
            for draw, positions in enumerate(drawn):
                yield PositionSet(selection, size, draw, positions)


def matched_sets(
    chosen: Sequence[int], pool: Sequence[int], delimiters: AbstractSet[int], draws: int, generator: np.random.Generator
) -> list[tuple[int, ...]]:
    """Random sets of positions matched to `chosen` in size, token type and distance from the decision.

    The pool is cut into thirds by distance, and each into delimiters and other tokens; every set takes as many
    positions from each part as `chosen` does. Overlap with `chosen` is left to chance.

    Args:
        chosen: positions of the pool.
        pool: all candidates, in order.
        delimiters: those positions whose token is only punctuation or white space.
        draws: number of sets.
        generator: of the draws.
    """
    third = {position: 3 * place // len(pool) for place, position in enumerate(pool)}
    parts: dict[tuple[int, bool], list[int]] = {}
    for position in pool:
        parts.setdefault((third[position], position in delimiters), []).append(position)
    taken = set(chosen)
    wanted = [(part, sum(position in taken for position in part)) for part in parts.values()]
    return [
        tuple(sorted(int(p) for part, size in wanted for p in generator.choice(part, size, replace=False)))
        for _ in range(draws)
    ]


def random_sets(pool: Sequence[int], size: int, draws: int, generator: np.random.Generator) -> list[tuple[int, ...]]:
    """Random sets of `size` positions, any of the pool: the paper's control."""
    return [tuple(sorted(int(p) for p in generator.choice(pool, size, replace=False))) for _ in range(draws)]
