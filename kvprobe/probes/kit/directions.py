"""Pairs edited in both directions, from the old value to the new one and back."""

from __future__ import annotations

from collections.abc import Sequence

from kvprobe.probes.base import Measurement
from kvprobe.tasks.pairs import Pair

DIRECTIONS = ("old_to_new", "new_to_old")


def both_ways(pairs: Sequence[Pair]) -> list[tuple[Measurement, Pair]]:
    """Every pair and its reverse, each with the columns `pair` and `direction` of its rows."""
    return [
        ({"pair": index, "direction": direction}, way)
        for index, pair in enumerate(pairs)
        for direction, way in zip(DIRECTIONS, (pair, pair.reversed()), strict=True)
    ]
