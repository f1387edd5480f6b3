"""The figure of the K-sweep probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.legacy.doses import dose_key, draw_dose, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel
from kvprobe.probes.editing.k_sweep.probe import COPY, monotone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = {
    "decision_attention": ("attention of the decision", COLORS["blue"]),
    "first_layer_deviation": ("change in the first layers", COLORS["purple"]),
    "suffix": ("the last tokens", COLORS["green"]),
    "random": ("at random", COLORS["grey"]),
    COPY: ("copied, by attention (upper bound)", COLORS["sky"]),
}
_BANDED = ("decision_attention", COPY)
_REFERENCES = {
    "erratum": ("erratum", COLORS["vermilion"], "-"),
    "field_and_erratum": ("field + erratum", COLORS["orange"], (0, (5, 2))),
}


def draw_k_sweep(panels: Sequence[Panel]) -> Figure:
    """Right decisions with their monotone fits, recovery, and K*; one column for each model."""
    with styled():
        figure, (rates, recoveries, stars) = panel_grid(panels, heights=(2.3, 2.1, 1.3))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            _draw_references(rates[column], panel, "correct_rate")
            _draw_references(recoveries[column], panel, "recovery")
            for name, (_, color) in _CURVES.items():
                # Five bands over each other would hide the curves; those of the others are about as wide.
                if name in _BANDED:
                    draw_dose(rates[column], panel, name, "correct_rate", color=color, ls="")
                _draw_fit(rates[column], panel, name, color=color, lw=1.5)
                draw_dose(recoveries[column], panel, name, "recovery", color=color)
            for axes in (rates[column], recoveries[column]):
                _size_axis(axes, panel)
            _draw_stars(stars[column], panel)
        rates[0].set_ylabel("share of\nright decisions")
        rates[0].set_ylim(-0.04, 1.06)
        recoveries[0].set_ylabel("recovery of\nthe new decision")
        first = first_measured(panels)
        if first is not None:
            names = [label for label, _ in _CURVES.values()]
            stars[first].set_yticks(range(len(names)), names[::-1], fontsize=7.5)
            figure.legend(handles=_key(panels), loc="outside lower center", ncols=3)
        figure.suptitle("How many tokens must be recomputed until an edit is as good as an erratum?", fontsize=11)
    return figure


def k_sweep_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Fits of right decisions by decision attention (solid) and of the upper bound (dotted); strokes: the erratum."""
    levels(axes, 0.0, 1.0)
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        draw_dose(axes, panel, "decision_attention", "correct_rate", color=color, ls="")
        _draw_fit(axes, panel, "decision_attention", color=color, lw=1.5, label=panel.model)
        _draw_fit(axes, panel, COPY, color=color, lw=1.0, ls=":")
        if "erratum.correct_rate" in panel.effects:
            axes.plot(1.0, panel.effects["erratum.correct_rate"].estimate, "_", **_AT_EDGE, color=color)
        _size_axis(axes, panel)
    axes.set_ylim(-0.04, 1.06)
    axes.set_ylabel("share of right decisions")
    axes.set_title("Recomputed tokens; dotted: copied")


_AT_EDGE: dict[str, Any] = {"ms": 12, "mew": 2.0, "clip_on": False}


def _draw_fit(axes: Axes, panel: Panel, selection: str, **line: Any) -> None:
    sizes = sizes_of(panel, selection, "correct_rate")
    if sizes:
        fitted = monotone([panel.effects[f"{selection}_{size}.correct_rate"].estimate for size in sizes])
        axes.plot(sizes, fitted, **line)


def _draw_references(axes: Axes, panel: Panel, metric: str) -> None:
    levels(axes, 0.0, 1.0)
    for name, (_, color, style) in _REFERENCES.items():
        effect = panel.effects.get(f"{name}.{metric}")
        if effect is not None:
            axes.axhline(effect.estimate, color=color, lw=1.4, ls=style, zorder=2)


def _draw_stars(axes: Axes, panel: Panel) -> None:
    """K* against the erratum, with its interval, by criterion."""
    for place, (name, (_, color)) in enumerate(reversed(_CURVES.items())):
        effect = panel.effects.get(f"{name}.k_star_erratum")
        if effect is not None:
            ends = [effect.low, effect.high]
            axes.plot(ends, [place] * 2, color=color, lw=4, alpha=0.35, solid_capstyle="butt", clip_on=False)
            axes.plot(effect.estimate, place, "o", color=color, ms=5, clip_on=False)
    _size_axis(axes, panel)
    sizes = sizes_of(panel, "decision_attention", "correct_rate")[:-1]
    if "tokens_after_field" in panel.effects:
        everything = panel.effects["tokens_after_field"].estimate
        axes.set_xticks([*sizes, everything], [*map(str, sizes), "all"])
    axes.set_xlabel("K* against the erratum (tokens)")
    axes.set_ylim(-0.6, len(_CURVES) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")


def _size_axis(axes: Axes, panel: Panel) -> None:
    """A logarithmic axis that shows 0 too, up to all tokens after the field."""
    from matplotlib.ticker import NullLocator

    sizes = sizes_of(panel, "decision_attention", "correct_rate")
    everything = panel.effects.get("tokens_after_field")
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
    axes.set_xticks([*sizes], [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.15, 1.1 * max([*sizes, 1, *([everything.estimate] if everything else [])]))
    axes.set_xlabel("tokens after the field, K")


def _key(panels: Sequence[Panel]) -> list[Any]:
    from matplotlib.lines import Line2D

    references = [
        Line2D([], [], color=color, lw=1.4, ls=style, label=label) for label, color, style in _REFERENCES.values()
    ]
    return [*dose_key(dict(_CURVES.values()), paper=any(panel.paper for panel in panels)), *references]
