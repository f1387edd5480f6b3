"""Which few tokens to recompute: criteria compared at a fixed K (protocol 5.2, critique ED2, ED3, G7).

The field and the K tokens that a criterion ranks first are really recomputed on the stale cache:

    decision_attention, first_layer_deviation, suffix   as in `kvprobe.edit.selection`; they see the stale prompt alone
    random              as many tokens drawn at random, many times
    profile             ranked by what patching a position alone does in pairs of *other* skeletons, by its slot
    profile_same_field  ranked so in other pairs of the *same* skeleton, with other values or wordings: a profile made
                        on one new value and used again for another
    profile_kv_change   ranked by how much keys and values change in pairs of other skeletons, by slot
    kv_change           upper bound: ranked by that change against the full prefill of the new prompt itself
    in_sample           upper bound: ranked by patching each position of the very pair it is scored on

Each set but the random ones is also copied from the full prefill (`X_K.copied_recovery`), as the paper does; the
difference, `X_copy_gap_K.recovery`, is what copying overstates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from pydantic import Field, PositiveInt

from kvprobe.edit.selection import candidates
from kvprobe.engine.cache import KVCache
from kvprobe.engine.first_layers import deviation
from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.aligned_positions import ranked, slot_scores, slots
from kvprobe.probes.kit.edit_arms import copied, oracle_cache, read_patches, recomputed, selection_order
from kvprobe.probes.kit.edit_cases import EditCase, measure_cases, reading_row
from kvprobe.probes.kit.position_sets import random_sets
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.ranking import SinglePositions, rankings, single_positions
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

BLIND = ("decision_attention", "first_layer_deviation", "suffix")
PROFILES = ("profile", "profile_same_field", "profile_kv_change")
UPPER_BOUNDS = ("kv_change", "in_sample")
RANDOM = "random"
COPIED = "_copied"
"""Ends the names of arms that are copied, not recomputed."""


@PROBES.register("selection_criterion")
class SelectionCriterion(Probe):
    """Recovery from a few recomputed tokens by how they were chosen."""

    needs_all_pairs: ClassVar[bool] = True

    sizes: tuple[PositiveInt, ...] = Field((4, 8), min_length=1, description="recomputed tokens after the field")
    draws: int = Field(8, ge=1, description="random sets for each pair and size")
    folds: int = Field(5, ge=2, description="groups of skeletons; each is ranked by the others")
    seed: int = Field(0, ge=0, description="of the random sets and of the folds")
    batch_size: int | None = Field(default=None, ge=1, description="decisions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each criterion and size, recomputed and copied, and for each random set.

        Raises:
            ConfigError: a pair does not say its entity, field and new value.
            SampleError: there are fewer skeletons than folds.
        """
        learned = self.learned_orders(subject, pairs, progress)

        def compare(case: EditCase, index: int) -> Iterator[Measurement]:
            return self._compare(subject, case, learned[index], index)

        count = len(pairs)
        return measure_cases(subject, pairs, lambda done, _: progress(count + done, 2 * count), compare)

    def learned_orders(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[dict[str, list[int]]]:
        """For each pair the orders that come from the readings of all: profiles and upper bounds."""
        singles: list[SinglePositions] = []
        changes: list[SinglePositions] = []
        for index, pair in enumerate(pairs):
            prefilled = prefill_pair(subject, pair)
            singles.append(single_positions(subject, pair, prefilled, self.batch_size))
            change = kv_change(prefilled.stale, prefilled.oracle, pair.downstream.positions)
            changes.append(replace(singles[-1], shifts=change, gap=sum(change.values())))
            progress(index + 1, 2 * len(pairs))
        by_effect, by_change = (rankings(pairs, each, self.folds, self.seed) for each in (singles, changes))
        orders = [
            {
                "profile": effect.held_out,
                "profile_same_field": same_field,
                "profile_kv_change": change.held_out,
                "kv_change": change.in_sample,
                "in_sample": effect.in_sample,
            }
            for effect, change, same_field in zip(by_effect, by_change, same_field_orders(pairs, singles), strict=True)
        ]
        return [{name: order for name, order in each.items() if order is not None} for each in orders]

    def _compare(
        self, subject: Subject, case: EditCase, learned: Mapping[str, list[int]], index: int
    ) -> Iterator[Measurement]:
        """All sets of one pair, decided together."""
        oracle = oracle_cache(subject, case)
        orders = {**{name: selection_order(subject, case, name) for name in BLIND}, **learned}
        sets: list[tuple[Measurement, KVPatch]] = []
        for name, order in orders.items():
            for size in self.sizes:
                arm = f"{name}_{size}"
                row = {"criterion": name, "size": size, "arm": arm}
                sets.append((row, recomputed(subject, case, order, size)))
                sets.append(({**row, "arm": f"{arm}{COPIED}"}, copied(case, oracle, order, size)))
        pool, generator = candidates(case.stale, case.edit), np.random.Generator(np.random.PCG64([self.seed, index]))
        for size in self.sizes:
            for draw, chosen in enumerate(random_sets(pool, min(size, len(pool)), self.draws, generator)):
                row = {"criterion": RANDOM, "size": size, "arm": f"{RANDOM}_{size}", "draw": draw}
                sets.append((row, recomputed(subject, case, chosen, size)))
        readings = read_patches(subject, case, [patch for _, patch in sets], self.batch_size)
        for (row, _), reading in zip(sets, readings, strict=True):
            yield {**row, **reading_row(reading)}


def kv_change(stale: KVCache, oracle: KVCache, positions: Sequence[int]) -> dict[int, float]:
    """By position, how far keys and values of two caches lie apart: norms summed over layers."""
    layers = zip(oracle.layers, stale.layers, strict=True)
    change = torch.stack([deviation(new, old) for new, old in layers]).sum(0)
    return {position: float(change[position]) for position in positions}


def same_field_orders(pairs: Sequence[Pair], singles: Sequence[SinglePositions]) -> list[list[int] | None]:
    """For each pair its positions as other pairs of its skeleton rank their slots; `None` where there is no other.

    Args:
        pairs: of all skeletons.
        singles: of the same pairs.
    """
    places = [slots(pair) for pair in pairs]
    orders: list[list[int] | None] = []
    for index, pair in enumerate(pairs):
        others = [
            i
            for i, other in enumerate(pairs)
            if i != index and other.scenario.skeleton == pair.scenario.skeleton and singles[i].decided
        ]
        if not others:
            orders.append(None)
            continue
        score = slot_scores((places[i], singles[i].shifts, singles[i].gap) for i in others)
        scores = {position: score(places[index][position]) for position in singles[index].shifts}
        orders.append(ranked(list(scores), scores.__getitem__))
    return orders
