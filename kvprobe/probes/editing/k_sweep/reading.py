"""What the rows of `k_sweep` mean: correct decisions over K against an erratum, and the K from which it is as good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.figures.by_model import model_color, model_marker
from kvprobe.figures.doses import dose_key, draw_dose
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS, levels
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.k_sweep.probe import COPIED_CRITERION, COPY, REFERENCES, KSweep
from kvprobe.probes.editing.k_sweep.smallest_size import against_reference, monotone
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, arm_effects, baseline_effects, recovery_difference
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CRITERIA = {
    "decision_attention": ("attention of the decision", COLORS["blue"]),
    "first_layer_deviation": ("change in the first layers", COLORS["purple"]),
    "suffix": ("the last tokens", COLORS["green"]),
    "random": ("at random", COLORS["grey"]),
    COPY: ("copied, by attention (upper bound)", COLORS["sky"]),
}
# Five bands over each other would hide the curves; those of the others are about as wide.
_BANDED = (COPIED_CRITERION, COPY)
_REFERENCES = {
    "erratum": ("erratum", COLORS["vermilion"], "-"),
    "field_and_erratum": ("field + erratum", COLORS["orange"], (0, (5, 2))),
}
_AXIS = "tokens after the field, K"


def effects(sample: Sample, probe: KSweep) -> Iterator[Effect]:
    """Correctness and recovery of every arm, fits against the erratum arms, K*, what copying overstates, baselines."""
    swept = sample.measured("size")
    for criterion, size, part in swept.by("criterion", "size"):
        yield from arm_effects(part.named(size=int(size)), f"{criterion}_{{size}}")
    for reference in REFERENCES:
        if len(part := sample.of(criterion=reference)):
            yield from arm_effects(part, reference)
    if len(swept):
        yield swept.per("pair", after_field="first").mean("tokens_after_field", "after_field", "tokens")
    for criterion, _ in swept.by("criterion"):
        for reference in REFERENCES:
            yield from against_reference(
                sample.of(criterion=(criterion, reference)), criterion, reference, probe.margin
            )
    for size in [size for size in probe.sizes if size]:
        part, name = sample.of(size=size).named(size=size), "copy_over_recompute_{size}.recovery"
        yield from recovery_difference(part, name, COPY, COPIED_CRITERION, by="criterion")
    yield from baseline_effects(sample)
    yield sample.maximum("noise.margin", "noise_floor")


def names(probe: KSweep) -> Iterator[str]:
    """Those of `effects`."""
    criteria = (*probe.criteria, COPY)
    swept = [f"{criterion}_{size}" for criterion in criteria for size in probe.sizes]
    yield from joined((*swept, *REFERENCES), ("correct_rate", "recovery"))
    yield from joined(swept, [f"over_{reference}" for reference in REFERENCES], "difference")
    yield from joined(criteria, [f"k_star_{reference}" for reference in REFERENCES])
    yield from joined([f"copy_over_recompute_{size}" for size in probe.sizes if size], "recovery")
    yield from ("tokens_after_field", *BASELINE_RATES, NOISE)


@dataclass(frozen=True)
class _Sweep:
    """One metric over K by criterion, with the erratum arms as lines; `fitted`: with its monotone fits."""

    metric: str
    ylabel: str
    height: float
    fitted: bool = False
    ylim: tuple[float, float] | None = None

    def draw(self, axes: Axes, panel: Panel) -> None:
        levels(axes, 0.0, 1.0)
        for name, (_, color, style) in _REFERENCES.items():
            if effect := panel.effects.get(f"{name}.{self.metric}"):
                axes.axhline(effect.estimate, color=color, lw=1.4, ls=style, zorder=2)
        for criterion, (_, color) in _CRITERIA.items():
            if not self.fitted:
                draw_dose(axes, panel, f"{criterion}_{{size}}", self.metric, color=color)
                continue
            if criterion in _BANDED:
                draw_dose(axes, panel, f"{criterion}_{{size}}", self.metric, color=color, ls="")
            _draw_fit(axes, panel, criterion, color=color, lw=1.5)
        _size_axis(axes, panel)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        from matplotlib.lines import Line2D

        references = [
            Line2D([], [], color=color, lw=1.4, ls=style, label=label) for label, color, style in _REFERENCES.values()
        ]
        return [*dose_key(dict(_CRITERIA.values()), paper=any(panel.paper for panel in panels)), *references]


class _SmallestSizes(Rates):
    """K* against the erratum, with its interval, by criterion."""

    def draw(self, axes: Axes, panel: Panel) -> None:
        super().draw(axes, panel)
        _size_axis(axes, panel, axes.get_xlabel(), whole=True)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:  # noqa: ARG002
        return []


@dataclass(frozen=True)
class _FitsByModel:
    """Fits by decision attention (solid) and of the upper bound (dotted), all models; strokes: the erratum."""

    title: str = "Recomputed tokens; dotted: copied"

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        levels(axes, 0.0, 1.0)
        for panel in (panel for panel in panels if panel.effects):
            color, marker = model_color(panels, panel), model_marker(panels, panel)
            draw_dose(axes, panel, f"{COPIED_CRITERION}_{{size}}", "correct_rate", color=color, marker=marker, ls="")
            _draw_fit(axes, panel, COPIED_CRITERION, color=color, lw=1.5, label=panel.model)
            _draw_fit(axes, panel, COPY, color=color, lw=1.0, ls=":")
            if erratum := panel.effects.get("erratum.correct_rate"):
                axes.plot(1.0, erratum.estimate, "_", ms=12, mew=2.0, clip_on=False, color=color)
            _size_axis(axes, panel)
        axes.set_ylim(-0.04, 1.06)
        axes.set_ylabel("share of correct decisions")
        axes.set_title(self.title)


def _draw_fit(axes: Axes, panel: Panel, criterion: str, **line: Any) -> None:
    if curve := panel.curve(f"{criterion}_{{size}}", "correct_rate"):
        axes.plot(list(curve), monotone([effect.estimate for effect in curve.values()]), **line)


def _size_axis(axes: Axes, panel: Panel, label: str = _AXIS, *, whole: bool = False) -> None:
    """A logarithmic axis that shows 0 too, up to all tokens after the field; `whole`: with a tick for all."""
    from matplotlib.ticker import NullLocator

    sizes = [int(size) for size in panel.curve(f"{COPIED_CRITERION}_{{size}}", "correct_rate")]
    everything = panel.effects.get("tokens_after_field")
    ticks: dict[float, str] = {size: str(size) for size in sizes}
    if whole and everything:
        ticks = {**{size: str(size) for size in sizes[:-1]}, everything.estimate: "all"}
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.15, 1.1 * max([*sizes, 1, *([everything.estimate] if everything else [])]))
    axes.set_xlabel(label)


READING = Reading(
    effects,
    FigureSpec(
        "How many tokens must be recomputed until an edit is as good as an erratum?",
        (
            _Sweep("correct_rate", "share of\ncorrect decisions", 2.3, fitted=True, ylim=(-0.04, 1.06)),
            _Sweep("recovery", "recovery of\nthe new decision", 2.1),
            _SmallestSizes(
                {criterion: label for criterion, (label, _) in _CRITERIA.items()},
                (Series("{arm}.k_star_erratum", "K*", COLORS["ink"]),),
                "K* against the erratum (tokens)",
                1.5,
                colors={criterion: color for criterion, (_, color) in _CRITERIA.items()},
            ),
        ),
        main=_FitsByModel(),
        key_columns=3,
    ),
    paper={
        # What the paper calls selective copies from a full prefill.
        f"{ours}.{effect}": PaperEntry("selective_direct", theirs, metric)
        for ours, theirs in {
            "erratum": "erratum",
            **{f"{COPY}_{k}": f"selective@{k}" for k in (4, 8, 16, 32, 64)},
        }.items()
        for effect, metric in (("correct_rate", "P_correct"), ("recovery", "mean_recovery"))
    },
    step=4,
    names=names,
)
