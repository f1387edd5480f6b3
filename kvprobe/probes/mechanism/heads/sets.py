"""Sets of heads: ranked on other skeletons, drawn at random, matched by layer (critique CI1, G7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.probes.kit.ranking import held_out_orders
from kvprobe.probes.mechanism.heads.patches import Head, HeadReading, all_heads
from kvprobe.tasks.pairs import Pair


@dataclass(frozen=True, eq=False)
class Selected:
    """What other skeletons say about one pair.

    Attributes:
        read, write, write_one, kv: all heads, the strongest first; `write_one` at the single position.
        mean: outputs at the decision `[layer, head, head_dim]` over prompts of both kinds.
        notes: positions after the field, the strongest first.
    """

    read: list[Head]
    write: list[Head]
    write_one: list[Head]
    kv: list[Head]
    mean: Tensor
    notes: list[int]


def select(pairs: Sequence[Pair], readings: Sequence[HeadReading], count: int, seed: int) -> list[Selected]:
    """For each pair, heads and positions as pairs of other skeletons rank them.

    Args:
        pairs: of all skeletons.
        readings: of each pair.
        count: of folds.
        seed: of the folds.

    Raises:
        SampleError: there are fewer skeletons than folds.
    """
    names = [pair.scenario.skeleton for pair in pairs]
    usable = [reading.positions.decided for reading in readings]
    orders = held_out_orders(pairs, [reading.positions for reading in readings], count, seed)
    read = [reading.read for reading in readings]
    kv = [reading.kv for reading in readings]
    write = [reading.write_attribution.sum(0) for reading in readings]
    at_one = [
        reading.write_attribution[order[0] - pair.field.end]
        for pair, reading, order in zip(pairs, readings, orders, strict=True)
    ]
    ranks = [held_out_ranks(names, scores, usable, count, seed) for scores in (read, write, at_one, kv)]
    means = held_out_means(names, [(one.base + one.donor) / 2 for one in readings], usable, count, seed)
    return [Selected(*found) for found in zip(*ranks, means, orders, strict=True)]


def ranked_heads(scores: Tensor) -> list[Head]:
    """All heads from the highest of `scores` `[layer, head]` to the lowest; of equal ones the later layer first."""
    return sorted(all_heads(scores), key=lambda head: (-float(scores[head]), -head[0], head[1]))


def held_out_ranks(
    skeletons: Sequence[str], scores: Sequence[Tensor], usable: Sequence[bool], count: int, seed: int
) -> list[list[Head]]:
    """For each pair all heads, ranked by their summed scores in pairs of other skeletons.

    Args:
        skeletons: of each pair.
        scores: of each pair `[layer, head]`, in logits.
        usable: whether the model decides the pair correctly; others teach nothing.
        count: of folds.
        seed: of the folds.

    Raises:
        SampleError: there are fewer skeletons than folds.
    """
    ranks: list[list[Head]] = [[] for _ in skeletons]
    for selection, evaluation in folds(skeletons, count, seed):
        total = _total(scores[0].new_zeros(scores[0].shape), (scores[i] for i in selection if usable[i]))
        for i in evaluation:
            ranks[i] = ranked_heads(total)
    return ranks


def held_out_means(
    skeletons: Sequence[str], values: Sequence[Tensor], usable: Sequence[bool], count: int, seed: int
) -> list[Tensor]:
    """For each pair the mean of `values` over pairs of other skeletons (of all, where none is usable)."""
    means: list[Tensor] = [values[0] for _ in skeletons]
    for selection, evaluation in folds(skeletons, count, seed):
        known = [values[i] for i in selection if usable[i]] or [values[i] for i in selection]
        mean = _total(values[0].new_zeros(values[0].shape), known) / len(known)
        for i in evaluation:
            means[i] = mean
    return means


def random_heads(ranked: Sequence[Head], size: int, generator: np.random.Generator) -> list[Head]:
    """`size` heads drawn from those that are not among the first `size` of `ranked` (from all, where too few are)."""
    others = ranked[size:] if len(ranked) >= 2 * size else ranked
    return [others[int(i)] for i in generator.choice(len(others), min(size, len(others)), replace=False)]


def matched_heads(ranked: Sequence[Head], size: int, generator: np.random.Generator) -> list[Head]:
    """As many heads as the first `size` of `ranked` (or all others, where they are fewer), drawn from the same layers.

    Each is a head of the same layer that is neither chosen nor drawn yet; where a layer has none left, one of the
    nearest layer that has.
    """
    left = list(ranked[size:])
    drawn: list[Head] = []
    for layer, _ in generator.permutation(list(ranked[:size])).tolist():
        if not left:
            break
        near = min(abs(other - layer) for other, _ in left)
        pool = [head for head in left if abs(head[0] - layer) == near]
        drawn.append(pool[int(generator.integers(len(pool)))])
        left.remove(drawn[-1])
    return drawn


def _total(start: Tensor, tables: Iterable[Tensor]) -> Tensor:
    return sum(tables, start)
