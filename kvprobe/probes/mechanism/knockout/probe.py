"""Attention knockout at the decision (protocol 1.4, critique ME3): what is decided when the notes cannot be read?

The decision token is kept from attending to a set of positions after the field, in the same way on four caches:

    stale        the old value and its notes
    field_only   the new value with the old notes
    new          the new value and its notes
    swapped      the old value under a rule whose two actions are exchanged, so that its notes name the other action

A model that falls back on one action whenever it is kept from reading moves on all four alike; only differences
between caches say anything about the notes. Sets of P percent of the positions after the field:

    attention_P          those the decision attends to most, on the field-only cache
    effect_P             those whose slots carry most of the field's effect in pairs of other skeletons
    effect_P_in_sample   those that carry most of it in this very pair
    low_effect_P         those whose slots carry least
    random_P             drawn at random
    equal_mass_P         drawn from all but `effect_P` until they hold the attention that `effect_P` holds
    early_layers, mid_layers, late_layers, all_layers   all positions, in some layers
    empty                no position: a floor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from kvprobe.engine.cache import KVCache
from kvprobe.engine.decision_attention import decision_attention
from kvprobe.engine.interventions import AttentionKnockout
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress, Share
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.depth import layer_thirds
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.ranking import Ranking, rank_pairs
from kvprobe.probes.mechanism.knockout.caches import four_caches
from kvprobe.probes.mechanism.knockout.key_sets import KeySet, key_sets
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FRACTIONS = (0.1, 0.25, 0.5, 0.75, 1.0)


@PROBES.register("knockout")
class Knockout(Probe):
    """What is decided when the decision token cannot attend to the notes, by key set and cache."""

    needs_all_pairs: ClassVar[bool] = True

    fractions: tuple[Share, ...] = Field(FRACTIONS, description="of the positions after the field")
    draws: int = Field(4, ge=1, description="random sets for each pair and fraction, and as many of equal mass")
    folds: int = Field(5, ge=2, description="groups of skeletons; each is ranked by the others")
    seed: int = Field(0, ge=0, description="of the random sets and of the folds")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each cache and key set."""
        rankings = rank_pairs(
            subject,
            pairs,
            lambda done, total: progress(done, 2 * total),
            folds=self.folds,
            seed=self.seed,
            batch_size=self.batch_size,
        )
        rows: list[Measurement] = []
        for index, (pair, ranking) in enumerate(zip(pairs, rankings, strict=True)):
            # Prefilled anew: the caches of all pairs of a large model would not fit in memory together.
            prefilled = prefill_pair(subject, pair)
            caches = four_caches(subject, pair, prefilled)
            attention = decision_attention(subject, pair.base.token_ids, caches["field_only"][1]).mean(dim=(0, 1))
            mass = {position: float(attention[position]) for position in pair.downstream.positions}
            described = [(_row(keys, mass), keys) for keys in self._key_sets(subject, mass, ranking, index)]
            for name, (prompt, cache) in caches.items():
                found = self._hide(subject, pair, prompt, cache, described)
                rows += [{"pair": index, **prefilled.common(), "cache": name, **row} for row in found]
            progress(len(pairs) + index + 1, 2 * len(pairs))
        return rows

    def _key_sets(self, subject: Subject, mass: dict[int, float], ranking: Ranking, index: int) -> list[KeySet]:
        """All key sets of one pair; the first is no knockout at all."""
        generator = np.random.Generator(np.random.PCG64([self.seed, index]))
        bands = {**layer_thirds(subject.layers), "all_layers": tuple(range(subject.layers))}
        return [
            KeySet("none", ()),
            KeySet("empty", ()),
            *key_sets(mass, ranking, self.fractions, self.draws, generator),
            *(KeySet(name, tuple(mass), layers=layers) for name, layers in bands.items()),
        ]

    def _hide(
        self,
        subject: Subject,
        pair: Pair,
        prompt: TokenizedContext,
        cache: KVCache,
        sets: Sequence[tuple[Measurement, KeySet]],
    ) -> list[Measurement]:
        """The decision on one cache under each key set."""
        # A window may hide all of a set already; where it does, the knockout rightly changes nothing.
        hidden = [
            AttentionKnockout((pair.decision_position,), keys.positions, keys.layers, no_op=True)
            for _, keys in sets[1:]
        ]
        unmasked, *masked = patched_margins(subject, pair, prompt, cache, [(), *hidden], batch_size=self.batch_size)
        return [
            {**row, "margin": margin, "unmasked": unmasked, "flipped": (margin > 0) != (unmasked > 0)}
            for (row, _), margin in zip(sets, [unmasked, *masked], strict=True)
        ]


def _row(keys: KeySet, mass: dict[int, float]) -> Measurement:
    row: Measurement = {"intervention": keys.intervention}
    if keys.fraction is not None:
        row["fraction"] = keys.fraction
    held = sum(mass[position] for position in keys.positions)
    return {**row, "attention_mass": held, "keys": len(keys.positions)}
