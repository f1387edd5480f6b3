"""Injection of false notes (protocol 2.4; critique G2, G7): does a prompt follow the notes of another conclusion?

The base is a consistent prefill. Entries after the field are overwritten with those of the prompt with the other
value, while the field itself stays: the notes now contradict it. Every pair is injected in both directions.

    all_notes     every entry after the field
    held_out_k    the k strongest positions, ranked by slot on pairs of other skeletons, cross-fitted
    in_sample_k   the k strongest positions of that very pair
    random_k      random sets of k positions

Two readings are kept apart, since a margin may move far without the decision turning: `recovery` and `margin_shift`
say how far the margin moves towards the injected conclusion; `flip_rate` is the share of decisions that turn, and
`argmax_rate` the share where the injected answer becomes the likeliest of all tokens. `half_shift_rate`, the share of
recoveries above one half, is what the paper's replication calls following.
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
from kvprobe.probes.kit.decisions import decision_row, read_patched
from kvprobe.probes.kit.measures import decision_effects
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.ranking import held_out_orders, in_sample_order, random_sets, single_positions
from kvprobe.probes.legacy import Probe
from kvprobe.probes.mechanism.specificity.probe import over_draws
from kvprobe.stats import Effect, StatisticsConfig, maximum, proportion
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

ALL = "all_notes"
SELECTIONS = ("held_out", "in_sample", "random")
DIRECTIONS = ("old_to_new", "new_to_old")


@PROBES.register("injection")
class Injection(Probe):
    """Whether a decision follows notes injected from a prompt with the other value, by how many are injected."""

    name: ClassVar[str] = "injection"
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{ALL}.recovery": PaperEntry("false_note_injection", "all_downstream", "recovery_to_injected"),
        f"{ALL}.flip_rate": PaperEntry("false_note_injection", "all_downstream", "decision_flip_rate"),
        **{
            f"in_sample_{size}.recovery": PaperEntry("false_note_injection", f"top_{size}", "recovery_to_injected")
            for size in (1, 2, 4, 8, 16, 32)
        },
    }

    class Parameters(base.Parameters):
        """Doses and how they are chosen."""

        sizes: tuple[int, ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1, description="numbers of positions")
        random_draws: int = Field(default=20, ge=1, description="random sets for each pair, direction and size")
        folds: int = Field(default=5, ge=2, description="of the cross-fitted ranking")
        seed: int = Field(default=0, ge=0, description="of folds and random sets")
        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """One row for each pair, direction and injected set.

        `m_base` and `m_donor` are those of the row's direction: `m_base` of the prompt that is injected into.
        """
        both_ways = [way for pair in pairs for way in (pair, pair.reversed())]
        batch, steps = self.parameters.batch_size, 3 * len(both_ways)
        singles = []
        for index, pair in enumerate(both_ways):
            singles.append(single_positions(subject, pair, prefill_pair(subject, pair), batch))
            progress(index + 1, steps)
        orders = held_out_orders(both_ways, singles, self.parameters.folds, self.parameters.seed)
        rows: list[Measurement] = []
        for index, pair in enumerate(both_ways):
            sets = self._sets(pair, index, in_sample_order(singles[index]), orders[index])
            direction = {"pair": index // 2, "direction": DIRECTIONS[index % 2]}
            rows += [{**direction, **row} for row in self._inject(subject, pair, sets)]
            progress(len(both_ways) + 2 * (index + 1), steps)
        return rows

    def _sets(
        self, pair: Pair, index: int, in_sample: list[int], held_out: list[int]
    ) -> list[tuple[str, int, tuple[int, ...]]]:
        """All sets of one pair and direction as (intervention, draw, positions)."""
        own, pool = self.parameters, list(pair.downstream.positions)
        generator = np.random.Generator(np.random.PCG64([own.seed, index]))
        sets = [(ALL, 0, tuple(pool))]
        for size in (size for size in own.sizes if size <= len(pool)):
            sets.append((f"held_out_{size}", 0, tuple(held_out[:size])))
            sets.append((f"in_sample_{size}", 0, tuple(in_sample[:size])))
            drawn = random_sets(pool, size, own.random_draws, generator)
            sets += [(f"random_{size}", draw, positions) for draw, positions in enumerate(drawn)]
        return sets

    def _inject(
        self, subject: Subject, pair: Pair, sets: Sequence[tuple[str, int, tuple[int, ...]]]
    ) -> list[Measurement]:
        unedited = prefill_pair(subject, pair)
        patches = [KVPatch(positions, unedited.oracle, no_op=True) for _, _, positions in sets]
        readings = read_patched(
            subject, pair, pair.base, unedited.stale, patches, batch_size=self.parameters.batch_size
        )
        return [
            {
                **unedited.common(),
                **decision_row(intervention, unedited.base, reading, len(positions)),
                "draw": draw,
                "injected_is_argmax": reading.argmax == pair.donor_answer_id,
            }
            for (intervention, draw, positions), reading in zip(sets, readings, strict=True)
        ]

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """For every dose the margin's shift and the decision's flips, each on its own; also by direction for all."""
        floor = float(rows["noise_floor"].max())
        effects: list[Effect] = []
        for _, part in rows.groupby("intervention", sort=False):
            effects += decision_effects(over_draws(part, statistics), statistics, floor)
            effects += _follow_effects(part, statistics)
        whole = rows[rows["intervention"] == ALL]
        for direction, part in whole.groupby("direction", sort=False):
            named = part.assign(intervention=f"{ALL}_{direction}")
            effects += decision_effects(named, statistics, floor)
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Shift and flips by dose, one above the other; one column for each model."""
        from kvprobe.probes.mechanism.injection.figure import draw_injection

        return draw_injection(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Shift and flips by dose of all models into one axes."""
        from kvprobe.probes.mechanism.injection.figure import injection_panel

        injection_panel(axes, panels)


def _follow_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """Shares of injections after which the injected answer is the likeliest token, and of shifts beyond one half."""
    name = rows["intervention"].iloc[0]
    recovery = (rows["margin"] - rows["m_base"]) / (rows["m_donor"] - rows["m_base"])
    clusters = rows[statistics.cluster]
    return [
        proportion(f"{name}.argmax_rate", rows["injected_is_argmax"], clusters=clusters, statistics=statistics),
        proportion(f"{name}.half_shift_rate", recovery > 0.5, clusters=clusters, statistics=statistics),
    ]
