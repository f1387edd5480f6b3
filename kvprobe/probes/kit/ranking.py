"""Ranking cache positions by what each does alone, in sample and for skeletons that the ranking never saw (G7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import Progress
from kvprobe.probes.kit import cross_fitting
from kvprobe.probes.kit.aligned_positions import ranked, slot_scores, slots
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True)
class SinglePositions:
    """What each position after the field does alone.

    Attributes:
        shifts: by position, the margin with that position's entries from the donor minus the base's, in logits.
        gap: margin of the donor minus that of the base, in logits.
        decided: whether the model decides both prompts correctly; only then can anything be learned from the pair.
    """

    shifts: dict[int, float]
    gap: float
    decided: bool


@dataclass(frozen=True)
class Ranking:
    """The positions of one pair, ranked by what each does alone.

    Attributes:
        single: the effect of each position on this very pair.
        scores: by position, the recovery that pairs of other skeletons find in its slot.
    """

    single: SinglePositions
    scores: Mapping[int, float]

    @property
    def in_sample(self) -> list[int]:
        """From the strongest to the weakest, by their effect on this very pair: an upper bound."""
        return in_sample_order(self.single)

    @property
    def held_out(self) -> list[int]:
        """From the strongest to the weakest, as pairs of other skeletons rank their slots."""
        return ranked(list(self.scores), self.scores.__getitem__)


def rank_pairs(
    subject: Subject, pairs: Sequence[Pair], progress: Progress, *, folds: int, seed: int, batch_size: int | None
) -> list[Ranking]:
    """Patch every position after the field of every pair alone, and rank them.

    Args:
        subject: the model.
        pairs: of all skeletons.
        progress: called after each pair.
        folds: groups of skeletons; each is ranked by the others.
        seed: of the folds.
        batch_size: patches in one forward pass.

    Raises:
        SampleError: there are fewer skeletons than folds.
    """
    singles: list[SinglePositions] = []
    for index, pair in enumerate(pairs):
        # Caches are not kept: those of all pairs of a large model would not fit in memory together.
        singles.append(single_positions(subject, pair, prefill_pair(subject, pair), batch_size))
        progress(index + 1, len(pairs))
    return rankings(pairs, singles, folds, seed)


def rankings(pairs: Sequence[Pair], singles: Sequence[SinglePositions], count: int, seed: int) -> list[Ranking]:
    """The ranking of each pair; arguments as in `held_out_scores`."""
    scores = held_out_scores(pairs, singles, count, seed)
    return [Ranking(*both) for both in zip(singles, scores, strict=True)]


def single_positions(
    subject: Subject, pair: Pair, prefilled: PrefilledPair, batch_size: int | None = None
) -> SinglePositions:
    """Patch every position after the field alone, all layers, from the donor (protocol 1.1 c)."""
    places = list(pair.downstream.positions)
    # Entries of tokens that attend to nothing changed may be bit-equal in both caches.
    patches = [KVPatch((position,), prefilled.oracle, no_op=True) for position in places]
    margins = patched_margins(subject, pair, pair.base, prefilled.stale, patches, batch_size=batch_size)
    return measured_alone(prefilled, dict(zip(places, margins, strict=True)))


def measured_alone(prefilled: PrefilledPair, margins: Mapping[int, float]) -> SinglePositions:
    """From the margin with each position patched alone, in logits."""
    base, donor = prefilled.base.margin, prefilled.donor.margin
    shifts = {position: margin - base for position, margin in margins.items()}
    return SinglePositions(shifts, donor - base, decided=base < 0 < donor)


def in_sample_order(single: SinglePositions) -> list[int]:
    """Positions of one pair from the strongest to the weakest, by their effect on that very pair."""
    return ranked(list(single.shifts), single.shifts.__getitem__)


def held_out_orders(
    pairs: Sequence[Pair], singles: Sequence[SinglePositions], count: int, seed: int
) -> list[list[int]]:
    """For each pair its positions from the strongest to the weakest, as pairs of other skeletons rank their slots.

    Arguments as in `held_out_scores`.
    """
    return [ranking.held_out for ranking in rankings(pairs, singles, count, seed)]


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
    for selection, evaluation in cross_fitting.folds([pair.scenario.skeleton for pair in pairs], count, seed):
        score = slot_scores((places[i], singles[i].shifts, singles[i].gap) for i in selection if singles[i].decided)
        for i in evaluation:
            scores[i] = {position: score(places[i][position]) for position in singles[i].shifts}
    return scores
