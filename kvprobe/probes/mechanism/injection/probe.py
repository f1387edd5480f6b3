"""Injection of false notes (protocol 2.4; critique G2, G7): does a prompt follow the notes of another conclusion?

The base is a consistent prefill. Entries after the field are overwritten with those of the prompt with the other
value, while the field itself stays: the notes now contradict it. Every pair is injected in both directions.

    all_notes     every entry after the field
    held_out_k    the k strongest positions, ranked by slot on pairs of other skeletons, cross-fitted
    in_sample_k   the k strongest positions of that very pair
    random_k      random sets of k positions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.decisions import decision_row, read_patched
from kvprobe.probes.kit.directions import both_ways
from kvprobe.probes.kit.position_sets import Selection, position_sets
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.ranking import Ranking, rank_pairs
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

ALL = "all_notes"


@PROBES.register("injection")
class Injection(Probe):
    """Whether a decision follows notes injected from a prompt with the other value, by how many are injected."""

    needs_all_pairs: ClassVar[bool] = True

    sizes: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 4, 8, 16, 32), min_length=1, description="numbers of positions"
    )
    random_draws: int = Field(default=20, ge=1, description="random sets for each pair, direction and size")
    folds: int = Field(default=5, ge=2, description="of the cross-fitted ranking")
    seed: int = Field(default=0, ge=0, description="of folds and random sets")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """One row for each pair, direction and injected set.

        `m_base` and `m_donor` are those of the row's direction: `m_base` of the prompt that is injected into.
        """
        ways = both_ways(pairs)
        rankings = rank_pairs(
            subject,
            [pair for _, pair in ways],
            lambda done, total: progress(done, 3 * total),
            folds=self.folds,
            seed=self.seed,
            batch_size=self.batch_size,
        )
        rows: list[Measurement] = []
        for index, ((direction, pair), ranking) in enumerate(zip(ways, rankings, strict=True)):
            rows += [{**direction, **row} for row in self._inject(subject, pair, self._sets(ranking, index))]
            progress(len(ways) + 2 * (index + 1), 3 * len(ways))
        return rows

    def _sets(self, ranking: Ranking, index: int) -> list[tuple[str, int, tuple[int, ...]]]:
        """All sets of one pair and direction as (intervention, draw, positions)."""
        draws: dict[Selection, int] = {"held_out": 1, "in_sample": 1, "random": self.random_draws}
        generator = np.random.Generator(np.random.PCG64([self.seed, index]))
        sets = position_sets(ranking, self.sizes, draws, generator)
        return [(ALL, 0, tuple(sorted(ranking.scores))), *((one.name, one.draw, one.positions) for one in sets)]

    def _inject(
        self, subject: Subject, pair: Pair, sets: Sequence[tuple[str, int, tuple[int, ...]]]
    ) -> list[Measurement]:
        prefilled = prefill_pair(subject, pair)
        patches = [KVPatch(positions, prefilled.oracle, no_op=True) for _, _, positions in sets]
        readings = read_patched(subject, pair, pair.base, prefilled.stale, patches, batch_size=self.batch_size)
        return [
            {
                **prefilled.common(),
                **decision_row(intervention, prefilled.base, reading, len(positions)),
                "draw": draw,
                "injected_is_argmax": reading.argmax == pair.donor_answer_id,
            }
            for (intervention, draw, positions), reading in zip(sets, readings, strict=True)
        ]
