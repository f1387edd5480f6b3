"""Ranking cache positions by what each does alone, in sample and for skeletons that the ranking never saw (G7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.kit.aligned_positions import ranked, slot_scores, slots
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.prefilled_pair import PrefilledPair
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True)
class SinglePositions:
    """What each position after the field does alone.

    Attributes:
        shifts: by position, the margin with that position's entries from the donor minus the base's, in logits.
        gap: margin of the donor minus that of the base, in logits.
        decided: whether the model decides both prompts rightly; only then can anything be learned from the pair.
    """

    shifts: dict[int, float]
    gap: float
    decided: bool


def single_positions(
    subject: Subject, pair: Pair, unedited: PrefilledPair, batch_size: int | None = None
) -> SinglePositions:
    """Patch every position after the field alone, all layers, from the donor (protocol 1.1 c)."""
    places = list(pair.downstream.positions)
    # Entries of tokens that attend to nothing changed may be bit-equal in both caches.
    patches = [KVPatch((position,), unedited.oracle, no_op=True) for position in places]
    margins = patched_margins(subject, pair, pair.base, unedited.stale, patches, batch_size=batch_size)
    base, donor = unedited.base.margin, unedited.donor.margin
    return SinglePositions(
        shifts={position: margin - base for position, margin in zip(places, margins, strict=True)},
        gap=donor - base,
        decided=base < 0 < donor,
    )


def in_sample_order(single: SinglePositions) -> list[int]:
    """Positions of one pair from the strongest to the weakest, by their effect on that very pair."""
    return ranked(list(single.shifts), lambda position: single.shifts[position])


def held_out_orders(
    pairs: Sequence[Pair], singles: Sequence[SinglePositions], count: int, seed: int
) -> list[list[int]]:
    """For each pair its positions from the strongest to the weakest, as pairs of other skeletons rank their slots.

    Arguments as in `held_out_scores`.
    """
    return [ranked(list(scores), scores.__getitem__) for scores in held_out_scores(pairs, singles, count, seed)]


def held_out_scores(
    pairs: Sequence[Pair], singles: Sequence[SinglePositions], count: int, seed: int
) -> list[dict[int, float]]:
    """For each pair the recovery that pairs of other skeletons find in the slot of each of its positions.

    Args:
        pairs: of all skeletons.
        singles: of the same pairs.
        count: of folds.
        seed: of the folds.

    Raises:
        SampleError: there are fewer skeletons than folds.
    """
    places = [slots(pair) for pair in pairs]
    scores: list[dict[int, float]] = [{} for _ in pairs]
    for selection, evaluation in folds([pair.scenario.skeleton for pair in pairs], count, seed):
        score = slot_scores((places[i], singles[i].shifts, singles[i].gap) for i in selection if singles[i].decided)
        for i in evaluation:
            scores[i] = {position: score(places[i][position]) for position in singles[i].shifts}
    return scores


def matched_sets(
    chosen: Sequence[int], pool: Sequence[int], delimiters: set[int], draws: int, generator: np.random.Generator
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
