"""Cost against correctness of all edit methods on the same pairs (protocol 5.1, critique ED1, ED2, ED4, G5).

Every arm starts from the stale cache of the base prompt and is asked for the decision under the new value:

    stale, field_only, selective_K, cacheblend_P, full_downstream, hoist_to_end, erratum, field_and_erratum,
    full_reprefill   as in `kvprobe.edit`
    oracle_copy_K    upper bound: field and K tokens copied from the full prefill, at the cost of that prefill

Costs are shares of the full reprefill of the same pair in the same run: tokens counted on the model's layers, FLOPs and
seconds from receipts. The decision token is left out of all of them, for every arm runs it once. Seconds are those of
the incremental work after a warm-up of every arm; they are reported, and on a shared machine nothing more.

    no_op   every in-place method applied to the value that stands there already; it must not move the decision
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import Field

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.edit_arms import (
    Arm,
    arm_effects,
    as_patch,
    make_arm,
    read_patches,
    recovery_differences,
    run_arm,
)
from kvprobe.probes.kit.edit_arms import same_value as to_same_value
from kvprobe.probes.kit.edit_cases import EditCase, baseline_columns, baseline_effects, edit_case
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, maximum, mean, proportion, ratio_of_sums
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

_PAPER_ARMS = {
    "stale": "stale",
    "field_only": "in_place",
    "cacheblend_15": "cacheblend@15%",
    "hoist_to_end": "hoist_to_end",
    "erratum": "erratum",
    "field_and_erratum": "field+erratum",
    "full_reprefill": "full_reprefill",
}
_SHARES = {"token_share": "tokens", "flop_share": "flops", "seconds_ratio": "seconds"}
_NO_OP = "no_op"
REFERENCE = "full_reprefill"


@PROBES.register("frontier")
class Frontier(Probe):
    """What each edit method costs and how often it decides rightly, all on the same pairs."""

    name: ClassVar[str] = "frontier"
    # The majority baseline is learned from the other pairs of a scenario.
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{ours}.{effect}": PaperEntry("frontier", theirs, metric)
        for ours, theirs in _PAPER_ARMS.items()
        for effect, metric in (("correct_rate", "P_correct"), ("token_share", "recompute_fraction"))
    }

    class Parameters(base.Parameters):
        """Sizes of the selective arms."""

        sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
            (8, 32), min_length=1, description="tokens that the selective arms recompute"
        )
        criterion: str = Field("decision_attention", description="how they are chosen")
        share: float = Field(0.15, gt=0, le=1, description="of the tokens that the CacheBlend-style arm recomputes")

    def arms(self) -> list[Arm]:
        """All arms, the upper bound last."""
        own = self.parameters
        chosen = {"criterion": own.criterion}
        return [
            *(make_arm(name, name) for name in ("stale", "field_only")),
            *(make_arm(f"selective_{k}", "selective", k=k, **chosen) for k in own.sizes),
            make_arm(f"cacheblend_{round(100 * own.share)}", "cacheblend", share=own.share),
            *(make_arm(name, name) for name in ("erratum", "field_and_erratum", "hoist_to_end")),
            *(make_arm(name, name) for name in ("full_downstream", REFERENCE)),
            make_arm(f"oracle_copy_{max(own.sizes)}", "oracle_copy", k=max(own.sizes), **chosen),
        ]

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each arm and one for each in-place arm as a no-op.

        Raises:
            ConfigError: a pair does not say its entity, field and new value.
        """
        arms, rows = self.arms(), []
        baselines = baseline_columns(pairs, subject.tokenizer)
        for index, pair in enumerate(pairs):
            case = edit_case(subject, pair)
            if not index:
                _warm_up(subject, case, arms)
            shared = {"pair": index, **case.common(), **baselines[index]}
            rows += [{**shared, "edit": "new", **run_arm(subject, case, arm)} for arm in arms]
            rows += [{**shared, "edit": "same", **row} for row in _no_op_rows(subject, case, arms)]
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Correctness, recovery, agreement and costs of every arm, contrasts, baselines, the no-op and the noise."""
        edits, no_ops = rows[rows["edit"] == "new"], rows[rows["edit"] == "same"]
        floor = float(rows["noise_floor"].max())
        reference = edits[edits["arm"] == REFERENCE].set_index("pair")
        effects: list[Effect] = []
        for name, part in edits.groupby("arm", sort=False):
            effects += arm_effects(str(name), part, statistics, floor)
            effects += _against_reference(str(name), part, reference, statistics)
        effects += _cost_contrasts(edits, statistics)
        effects += recovery_differences(edits, self._contrasts(), statistics)
        effects += baseline_effects(edits, statistics)
        error, clusters = (no_ops["margin"] - no_ops["m_base"]).abs(), no_ops[statistics.cluster]
        effects.append(maximum(f"{_NO_OP}.error", error, clusters=clusters))
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def _contrasts(self) -> dict[str, tuple[str, str]]:
        size = max(self.parameters.sizes)
        return {
            f"oracle_copy_over_selective_{size}.recovery": (f"oracle_copy_{size}", f"selective_{size}"),
            "field_under_erratum.recovery": ("field_and_erratum", "erratum"),
            "field_alone.recovery": ("field_only", "stale"),
        }

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Correctness and recovery against cost; one column for each model."""
        from kvprobe.probes.editing.frontier.figure import draw_frontier

        return draw_frontier(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Correctness against the share of tokens run, all models."""
        from kvprobe.probes.editing.frontier.figure import frontier_panel

        frontier_panel(axes, panels)


def pareto_front(costs: Mapping[str, float], gains: Mapping[str, float]) -> list[str]:
    """Names that no other beats: nothing is as cheap or cheaper and better, or as good and cheaper; cheapest first."""
    front: list[str] = []
    for name in sorted(costs, key=lambda name: (costs[name], -gains[name])):
        if not front or gains[name] > gains[front[-1]]:
            front.append(name)
    return front


def _warm_up(subject: Subject, case: EditCase, arms: Sequence[Arm]) -> None:
    for arm in arms:
        arm.method.apply(subject, case.stale, case.edit)


def _no_op_rows(subject: Subject, case: EditCase, arms: Sequence[Arm]) -> list[Measurement]:
    """The methods that write new entries in place, applied to the value that is there."""
    same = to_same_value(case)
    in_place = [arm for arm in arms if _is_in_place(arm)]
    patches = [as_patch(same, arm.method.apply(subject, same.stale, same.edit)) for arm in in_place]
    readings = read_patches(subject, same, patches)
    return [{"arm": arm.name, "margin": reading.margin} for arm, reading in zip(in_place, readings, strict=True)]


def _is_in_place(arm: Arm) -> bool:
    # An appended or a moved line is another prompt, whatever it says.
    appends = ("stale", "erratum", "field_and_erratum", "hoist_to_end")
    return arm.method.name not in appends and not arm.method.upper_bound


def _against_reference(
    name: str, rows: pd.DataFrame, reference: pd.DataFrame, statistics: StatisticsConfig
) -> Iterator[Effect]:
    """`X.agreement` with the full reprefill over the whole vocabulary, `X.token_share` and so on, `X.bytes_written`."""
    ought = reference.loc[rows["pair"]]
    shared: dict[str, Any] = {"clusters": rows[statistics.cluster], "statistics": statistics}
    agrees = rows["argmax"].to_numpy() == ought["argmax"].to_numpy()
    yield proportion(f"{name}.agreement", agrees.astype(float), **shared)
    for effect, column in _SHARES.items():
        yield ratio_of_sums(f"{name}.{effect}", rows[column], ought[column], **shared)
    yield mean(f"{name}.bytes_written", rows["bytes_written"], unit="bytes", **shared)


def _cost_contrasts(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """How much of a prefill's tokens hoisting runs more than an erratum (critique ED4)."""
    tokens = rows.pivot(index="pair", columns="arm", values="tokens")
    clusters = rows.groupby("pair")[statistics.cluster].first().loc[tokens.index]
    more = tokens["hoist_to_end"] - tokens["erratum"]
    yield ratio_of_sums(
        "hoist_over_erratum.token_share", more, tokens[REFERENCE], clusters=clusters, statistics=statistics
    )
