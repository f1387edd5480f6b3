"""How many tokens must be recomputed until an edit is as good as an erratum (protocol 5.2, critique ED2, ED5)?

On each pair the field and the first K tokens after it, as a criterion ranks them on the stale cache, are really
recomputed, for every K and every criterion, beside the arms `erratum` and `field_and_erratum`. All share pairs, caches
and seeds. The upper bound `oracle_copy` copies the tokens that `decision_attention` chooses from the full prefill, as
the paper's selective arms do. K is capped at the number of tokens after the field.

Effects: `X_K.correct_rate` and `X_K.recovery` for criterion X; `X_K.over_erratum.difference`, the isotonic fit of the
share of right decisions over K less the erratum's share, bootstrapped by skeleton and no surer than as many skeletons
that all agree can be; and `X.k_star_erratum`, the smallest
K whose fit is no more than `margin` below the erratum's share. Its interval inverts those of the differences: it goes
from the first K that may be within the margin to the first K that is non-inferior, which is the one to use. Where no K
is, all tokens after the field stand in for it, for recomputing all of them is the oracle. The same against
`field_and_erratum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field, field_validator
from sklearn.isotonic import isotonic_regression

from kvprobe.edit.selection import SELECTIONS, candidates
from kvprobe.engine.interventions import KVPatch
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.edit_arms import (
    arm_effects,
    copied,
    make_arm,
    oracle_cache,
    read_patches,
    recomputed,
    recovery_differences,
    run_arm,
    selection_order,
)
from kvprobe.probes.kit.edit_cases import EditCase, baseline_columns, baseline_effects, edit_case, reading_row
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, bootstrapped, maximum, mean
from kvprobe.stats.effects import RANGE
from kvprobe.stats.labels import Label
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

REFERENCES = ("erratum", "field_and_erratum")
COPY = "oracle_copy"
_COPIED_CRITERION = "decision_attention"
_PAPER_SIZES = (4, 8, 16, 32, 64)


@PROBES.register("k_sweep")
class KSweep(Probe):
    """Share of right decisions and recovery over the number of recomputed tokens, against an erratum."""

    name: ClassVar[str] = "k_sweep"
    # The majority baseline is learned from the other pairs of a scenario.
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        # What the paper calls selective copies from a full prefill.
        **{
            f"{COPY}_{k}.{effect}": PaperEntry("selective_direct", f"selective@{k}", metric)
            for k in _PAPER_SIZES
            for effect, metric in (("correct_rate", "P_correct"), ("recovery", "mean_recovery"))
        },
        "erratum.correct_rate": PaperEntry("selective_direct", "erratum", "P_correct"),
        "erratum.recovery": PaperEntry("selective_direct", "erratum", "mean_recovery"),
    }

    class Parameters(base.Parameters):
        """Sizes, criteria, and what counts as no worse."""

        sizes: tuple[int, ...] = Field((0, 1, 2, 4, 8, 16, 32, 64), min_length=2, description="recomputed tokens")
        criteria: tuple[str, ...] = ("decision_attention", "first_layer_deviation", "suffix", "random")
        margin: float = Field(0.15, gt=0, lt=1, description="largest loss of right decisions that counts as none")
        batch_size: int | None = Field(default=None, ge=1, description="decisions in one forward pass")

        @field_validator("criteria")
        @classmethod
        def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
            for name in names:
                SELECTIONS.get(name)
            return names

        @field_validator("sizes")
        @classmethod
        def _increasing(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
            if list(sizes) != sorted(set(sizes)) or sizes[0] < 0:
                raise ValueError("give increasing sizes from 0 on")
            return sizes

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each criterion and size, and one for each erratum arm.

        Raises:
            ConfigError: a pair does not say its entity, field and new value.
        """
        arms, rows = [make_arm(name, name) for name in REFERENCES], []
        baselines = baseline_columns(pairs, subject.tokenizer)
        for index, pair in enumerate(pairs):
            case = edit_case(subject, pair)
            shared = {"pair": index, **case.common(), **baselines[index]}
            rows += [{**shared, **run_arm(subject, case, arm), "criterion": arm.name} for arm in arms]
            rows += [{**shared, **row} for row in self._sweep(subject, case)]
            progress(index + 1, len(pairs))
        return rows

    def _sweep(self, subject: Subject, case: EditCase) -> list[Measurement]:
        own, after = self.parameters, len(candidates(case.stale, case.edit))
        orders = {name: selection_order(subject, case, name) for name in own.criteria}
        field_alone = recomputed(subject, case, (), 0)
        described: list[tuple[str, int]] = []
        patches: list[KVPatch] = []
        for name, order in orders.items():
            for size in own.sizes:
                described.append((name, size))
                patches.append(recomputed(subject, case, order, size) if size else field_alone)
        if _COPIED_CRITERION in orders:
            oracle = oracle_cache(subject, case)
            described += [(COPY, size) for size in own.sizes]
            patches += [copied(case, oracle, orders[_COPIED_CRITERION], size) for size in own.sizes]
        readings = read_patches(subject, case, patches, own.batch_size)
        return [
            {
                "arm": f"{name}_{size}",
                "criterion": name,
                "size": size,
                "recomputed": min(size, after),
                "after_field": after,
                **reading_row(reading),
            }
            for (name, size), reading in zip(described, readings, strict=True)
        ]

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Correctness and recovery of every arm, fits against the erratum arms, K*, what copying overstates."""
        floor = float(rows["noise_floor"].max())
        effects: list[Effect] = []
        for name, part in rows.groupby("arm", sort=False):
            effects += arm_effects(str(name), part, statistics, floor)
        after = rows.groupby("pair")[["after_field", statistics.cluster]].first()
        length = mean(
            "tokens_after_field",
            after["after_field"],
            clusters=after[statistics.cluster],
            statistics=statistics,
            unit="tokens",
        )
        effects.append(length)
        for criterion, part in rows[rows["size"].notna()].groupby("criterion", sort=False):
            for reference in REFERENCES:
                effects += self._against(str(criterion), part, rows[rows["arm"] == reference], length, statistics)
        gaps = {
            f"copy_over_recompute_{k}.recovery": (f"{COPY}_{k}", f"{_COPIED_CRITERION}_{k}")
            for k in self.parameters.sizes
            if k
        }
        effects += recovery_differences(rows, gaps, statistics)
        effects += baseline_effects(rows, statistics)
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def _against(
        self,
        criterion: str,
        rows: pd.DataFrame,
        reference: pd.DataFrame,
        length: Effect,
        statistics: StatisticsConfig,
    ) -> Iterator[Effect]:
        """Fitted differences from one reference arm, and K* from them."""
        name = reference["arm"].iloc[0]
        table = rows.assign(size=rows["size"].astype(int), correct=rows["correct"].astype(float))
        decided = table.pivot(index="pair", columns="size", values="correct")
        sizes = [int(size) for size in decided.columns]
        decided["reference"] = reference.set_index("pair")["correct"].astype(float)
        clusters = rows.groupby("pair")[statistics.cluster].first().loc[decided.index]
        # Clusters that all agree have no spread and could still hide a difference: the rule of three, exactly.
        hidden = 1 - (1 - statistics.confidence) ** (1 / clusters.nunique())
        shared: dict[str, Any] = {"clusters": clusters, "statistics": statistics, "noise_floor": hidden}
        differences = [
            bootstrapped(f"{criterion}_{size}.over_{name}.difference", decided, _fitted_difference(place), **shared)
            for place, size in enumerate(sizes)
        ]
        yield from differences
        yield smallest_within(f"{criterion}.k_star_{name}", sizes, differences, -self.parameters.margin, length)

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Correctness and recovery over K with the erratum's; one column for each model."""
        from kvprobe.probes.editing.k_sweep.figure import draw_k_sweep

        return draw_k_sweep(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Share of right decisions over K by decision attention, all models."""
        from kvprobe.probes.editing.k_sweep.figure import k_sweep_panel

        k_sweep_panel(axes, panels)


def monotone(rates: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """`[size]` shares made non-decreasing by least squares (isotonic regression), each size with equal weight."""
    return np.asarray(isotonic_regression(np.asarray(rates, dtype=float)), dtype=float)


def smallest_within(
    name: str, sizes: Sequence[int], differences: Sequence[Effect], margin: float, everything: Effect
) -> Effect:
    """The smallest size whose difference is at least `margin`, with the interval that inverts the differences'.

    Args:
        name: of the effect.
        sizes: increasing.
        differences: of each size from the reference, with their intervals.
        margin: the least difference that counts as none, below 0.
        everything: the size that stands in where none is enough: all tokens there are.
    """

    def first(value: Callable[[Effect], float]) -> float:
        enough = (s for s, each in zip(sizes, differences, strict=True) if value(each) >= margin)
        return float(next(enough, max(everything.estimate, sizes[-1])))

    ranged = any(each.is_range for each in differences)
    return Effect(
        label=Label.of(name),
        estimate=first(lambda each: each.estimate),
        low=first(lambda each: each.high),
        high=first(lambda each: each.low),
        n=differences[0].n,
        clusters=differences[0].clusters,
        unit="tokens",
        method=RANGE if ranged else "inverted cluster bootstrap",
        seed=differences[0].seed,
        confidence=differences[0].confidence,
    )


def _fitted_difference(place: int) -> Callable[[pd.DataFrame], float]:
    """The fit at the size in column `place` less the mean of the last column."""

    def difference(rows: pd.DataFrame) -> float:
        rates = rows.to_numpy().mean(axis=0)
        return float(monotone(rates[:-1])[place] - rates[-1])

    return difference
