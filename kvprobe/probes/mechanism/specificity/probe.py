"""Specificity (protocol 2.3; critique G7): do a few particular positions carry the effect, or would any few do?

Positions after the field are ranked by what each does alone, and the k strongest are patched together from the donor.

    in_sample_k   ranked on the pair that is patched, as in the paper: the upper bound
    held_out_k    ranked by slot (segment and place beside the last mention of a value or action) on pairs of other
                  skeletons, cross-fitted
    matched_k     random sets with as many positions from each third of the prompt and of each token type
                  (delimiter or not) as held_out_k
    random_k      random sets of any positions, as in the paper

`reach_rate` is the share of matched sets that move the decision at least as far as the held-out set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from kvprobe.engine.interventions import KVPatch
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.aligned_positions import is_delimiter
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.measures import decision_effects
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.ranking import (
    SinglePositions,
    held_out_orders,
    in_sample_order,
    matched_sets,
    random_sets,
    single_positions,
)
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, maximum, proportion, ratio_of_sums
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

SELECTIONS = ("in_sample", "held_out", "matched", "random")


@PROBES.register("specificity")
class Specificity(Probe):
    """Whether the strongest positions, ranked on other skeletons, do more than matched random sets of as many."""

    name: ClassVar[str] = "specificity"
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{ours}_{size}.recovery": PaperEntry("specificity", f"{theirs}_{size}", "decision_recovery")
        for ours, theirs in (("in_sample", "top"), ("random", "random"))
        for size in (1, 2, 4, 8, 16, 32, 64)
    }

    class Parameters(base.Parameters):
        """Sizes of the sets and how they are drawn."""

        sizes: tuple[int, ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1, description="numbers of positions")
        matched_draws: int = Field(default=100, ge=1, description="matched random sets for each pair and size")
        random_draws: int = Field(default=20, ge=1, description="unmatched random sets for each pair and size")
        folds: int = Field(default=5, ge=2, description="of the cross-fitted ranking")
        seed: int = Field(default=0, ge=0, description="of folds and random sets")
        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Rows `single_position` for each pair and position, and `decision` for each set that is patched."""
        singles = []
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            unedited = prefill_pair(subject, pair)
            single = single_positions(subject, pair, unedited, self.parameters.batch_size)
            singles.append(single)
            rows += [{"pair": index, **unedited.common(), **row} for row in _position_rows(pair, unedited, single)]
            progress(index + 1, 4 * len(pairs))
        orders = held_out_orders(pairs, singles, self.parameters.folds, self.parameters.seed)
        for index in range(len(pairs)):
            rows += self._measure_sets(subject, pairs, index, singles[index], orders[index])
            progress(len(pairs) + 3 * (index + 1), 4 * len(pairs))
        return rows

    def _measure_sets(
        self, subject: Subject, pairs: Sequence[Pair], index: int, single: SinglePositions, held_out: list[int]
    ) -> list[Measurement]:
        pair = pairs[index]
        unedited = prefill_pair(subject, pair)
        sets = self._sets(subject, pair, index, in_sample_order(single), held_out)
        patches = [KVPatch(positions, unedited.oracle, no_op=True) for _, _, _, positions in sets]
        margins = patched_margins(
            subject, pair, pair.base, unedited.stale, patches, batch_size=self.parameters.batch_size
        )
        return [
            {
                "pair": index,
                **unedited.common(),
                "measurement": "decision",
                "intervention": f"{selection}_{size}",
                "draw": draw,
                "positions": size,
                "margin": margin,
                "flipped": (margin > 0) != (unedited.base.margin > 0),
            }
            for (selection, size, draw, _), margin in zip(sets, margins, strict=True)
        ]

    def _sets(
        self, subject: Subject, pair: Pair, index: int, in_sample: list[int], held_out: list[int]
    ) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """All sets of one pair as (selection, size, draw, positions); sizes beyond the prompt are left out."""
        own, pool = self.parameters, sorted(held_out)
        ids = pair.base.token_ids
        delimiters = {position for position in pool if is_delimiter(ids[position], subject.tokenizer)}
        generator = np.random.Generator(np.random.PCG64([own.seed, index]))
        sets: list[tuple[str, int, int, tuple[int, ...]]] = []
        for size in (size for size in own.sizes if size <= len(pool)):
            best = held_out[:size]
            sets += [("in_sample", size, 0, tuple(in_sample[:size])), ("held_out", size, 0, tuple(best))]
            matched = matched_sets(best, pool, delimiters, own.matched_draws, generator)
            free = random_sets(pool, size, own.random_draws, generator)
            sets += [("matched", size, draw, drawn) for draw, drawn in enumerate(matched)]
            sets += [("random", size, draw, drawn) for draw, drawn in enumerate(free)]
        return sets

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Recovery, margin shift and flip rate by selection and size, the held-out set's lead, its reach rate."""
        decisions = rows[rows["measurement"] == "decision"]
        floor = float(decisions["noise_floor"].max())
        effects: list[Effect] = []
        for size in sorted(decisions["positions"].astype(int).unique()):
            of_size = {name: decisions[decisions["intervention"] == f"{name}_{size}"] for name in SELECTIONS}
            for part in of_size.values():
                effects += decision_effects(over_draws(part, statistics), statistics, floor)
            effects += _lead(size, of_size["held_out"], of_size["matched"], statistics, floor)
        effects.append(maximum("noise.margin", decisions["noise_floor"], clusters=decisions[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Recovery by the number of patched positions; one column for each model."""
        from kvprobe.probes.mechanism.specificity.figure import draw_specificity

        return draw_specificity(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Held-out and matched curves of all models into one axes."""
        from kvprobe.probes.mechanism.specificity.figure import specificity_panel

        specificity_panel(axes, panels)


def over_draws(rows: pd.DataFrame, statistics: StatisticsConfig) -> pd.DataFrame:
    """One row for each pair (and direction, where there are two): margins and flips as means over its draws."""
    keys = [key for key in ("pair", "direction", "intervention", statistics.cluster) if key in rows]
    values = ["margin", "m_base", "m_donor", "flipped"]
    numbers = rows.assign(flipped=rows["flipped"].astype(float))
    return numbers.groupby(keys, sort=False)[values].mean().reset_index()


def _position_rows(pair: Pair, unedited: PrefilledPair, single: SinglePositions) -> list[Measurement]:
    return [
        {
            "measurement": "single_position",
            "position": position,
            "segment": pair.base.segment_of(position),
            "margin": unedited.base.margin + shift,
        }
        for position, shift in single.shifts.items()
    ]


def _lead(
    size: int, held_out: pd.DataFrame, matched: pd.DataFrame, statistics: StatisticsConfig, floor: float
) -> list[Effect]:
    """How far the held-out set is ahead of its matched sets, and the share of them that reach it."""
    best = held_out.set_index("pair")
    drawn = matched.groupby("pair")["margin"].mean().loc[best.index]
    reached = matched["margin"].to_numpy() >= best.loc[matched["pair"], "margin"].to_numpy()
    gap = best["m_donor"] - best["m_base"]
    return [
        ratio_of_sums(
            f"lead_{size}.recovery",
            best["margin"] - drawn,
            gap,
            clusters=best[statistics.cluster],
            statistics=statistics,
            noise_floor=floor,
        ),
        proportion(f"matched_{size}.reach_rate", reached, clusters=matched[statistics.cluster], statistics=statistics),
    ]
