"""The sets of positions that `knockout` hides: by attention, by effect, at random, of equal attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.probes.kit.aligned_positions import ranked
from kvprobe.probes.kit.position_sets import random_sets
from kvprobe.probes.kit.ranking import Ranking


@dataclass(frozen=True)
class KeySet:
    """Positions to hide from the decision token.

    Attributes:
        intervention: name of the set.
        positions: of the prompt.
        fraction: of the positions after the field; `None` where the set is not one of several sizes.
        layers: numbers; `None` for all.
    """

    intervention: str
    positions: tuple[int, ...]
    fraction: float | None = None
    layers: tuple[int, ...] | None = None


def key_sets(
    mass: Mapping[int, float],
    ranking: Ranking,
    fractions: Sequence[float],
    draws: int,
    generator: np.random.Generator,
) -> Iterator[KeySet]:
    """The sets of every size.

    Args:
        mass: attention that the decision pays to each position after the field.
        ranking: of these positions.
        fractions: sizes, as shares of these positions.
        draws: number of random sets of each size, and of sets of equal mass.
        generator: of the draws.
    """
    span = list(mass)
    orders = {
        "attention_{}": ranked(span, mass.__getitem__),
        "effect_{}": ranking.held_out,
        "effect_{}_in_sample": ranking.in_sample,
        "low_effect_{}": ranked(span, lambda position: -abs(ranking.scores[position])),
    }
    for fraction in fractions:
        percent, size = round(100 * fraction), math.ceil(fraction * len(span) - 1e-9)
        if size == len(span):
            yield KeySet(f"attention_{percent}", tuple(span), fraction)
            continue
        for name, order in orders.items():
            yield KeySet(name.format(percent), tuple(order[:size]), fraction)
        for positions in random_sets(span, size, draws, generator):
            yield KeySet(f"random_{percent}", positions, fraction)
        for _ in range(draws):
            yield KeySet(f"equal_mass_{percent}", equal_mass(ranking.held_out[:size], mass, generator), fraction)


def equal_mass(acting: Sequence[int], mass: Mapping[int, float], generator: np.random.Generator) -> tuple[int, ...]:
    """Positions drawn from all but `acting` until they hold the attention that `acting` holds.

    All others are taken where they hold less altogether; the rows' `attention_mass` says so. At least one is taken
    where there is one.

    Args:
        acting: the positions to match.
        mass: attention mass of every position that may be drawn.
        generator: draws.
    """
    wanted = sum(mass[position] for position in acting)
    others = [position for position in mass if position not in set(acting)]
    drawn: list[int] = []
    held = 0.0
    for position in generator.permutation(others).tolist():
        if drawn and held >= wanted:
            break
        drawn.append(int(position))
        held += mass[position]
    return tuple(drawn)
