"""Specificity (protocol 2.3; critique G7): do a few particular positions carry the effect, or would any few do?

Positions after the field are ranked by what each does alone, and the k strongest are patched together from the donor.

    in_sample_k   ranked on the pair that is patched, as in the paper: the upper bound
    held_out_k    ranked by slot (segment and place beside the last mention of a value or action) on pairs of other
                  skeletons, cross-fitted
    matched_k     random sets with as many positions from each third of the prompt and of each token type
                  (delimiter or not) as held_out_k
    random_k      random sets of any positions, as in the paper
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.aligned_positions import delimiters
from kvprobe.probes.kit.decisions import margin_rows
from kvprobe.probes.kit.position_sets import Selection, position_sets
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.ranking import Ranking, SinglePositions, rank_pairs
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@PROBES.register("specificity")
class Specificity(Probe):
    """Whether the strongest positions, ranked on other skeletons, do more than matched random sets of as many."""

    needs_all_pairs: ClassVar[bool] = True

    sizes: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 4, 8, 16, 32), min_length=1, description="numbers of positions"
    )
    matched_draws: int = Field(default=100, ge=1, description="matched random sets for each pair and size")
    random_draws: int = Field(default=20, ge=1, description="unmatched random sets for each pair and size")
    folds: int = Field(default=5, ge=2, description="of the cross-fitted ranking")
    seed: int = Field(default=0, ge=0, description="of folds and random sets")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Rows `single_position` for each pair and position, and `decision` for each set that is patched."""
        rankings = rank_pairs(
            subject,
            pairs,
            lambda done, total: progress(done, 4 * total),
            folds=self.folds,
            seed=self.seed,
            batch_size=self.batch_size,
        )
        alone: list[Measurement] = []
        together: list[Measurement] = []
        for index, (pair, ranking) in enumerate(zip(pairs, rankings, strict=True)):
            prefilled = prefill_pair(subject, pair)
            alone += [{"pair": index, **row} for row in _alone(pair, prefilled, ranking.single)]
            together += [{"pair": index, **row} for row in self._together(subject, pair, prefilled, ranking, index)]
            progress(len(pairs) + 3 * (index + 1), 4 * len(pairs))
        return alone + together

    def _together(
        self, subject: Subject, pair: Pair, prefilled: PrefilledPair, ranking: Ranking, index: int
    ) -> list[Measurement]:
        draws: dict[Selection, int] = {
            "in_sample": 1,
            "held_out": 1,
            "matched": self.matched_draws,
            "random": self.random_draws,
        }
        generator = np.random.Generator(np.random.PCG64([self.seed, index]))
        sets = [
            (
                {
                    "measurement": "decision",
                    "intervention": chosen.name,
                    "draw": chosen.draw,
                    "positions": chosen.size,
                },
                KVPatch(chosen.positions, prefilled.oracle, no_op=True),
            )
            for chosen in position_sets(ranking, self.sizes, draws, generator, delimiters(pair, subject.tokenizer))
        ]
        return margin_rows(subject, pair, prefilled, sets, self.batch_size)


def _alone(pair: Pair, prefilled: PrefilledPair, single: SinglePositions) -> list[Measurement]:
    return [
        {
            **prefilled.common(),
            "measurement": "single_position",
            "position": position,
            "segment": pair.base.segment_of(position),
            "margin": prefilled.base.margin + shift,
        }
        for position, shift in single.shifts.items()
    ]
