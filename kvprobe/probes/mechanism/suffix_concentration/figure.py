"""The figure of the suffix concentration probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.legacy.doses import dose_axis, dose_key, draw_dose, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_doses_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOSES = {"suffix": ("the last tokens", COLORS["blue"]), "prefix": ("the first tokens", COLORS["orange"])}
_TOP = {
    "top_in_sample": ("top k, ranked on the pair itself", COLORS["sky"]),
    "top_held_out": ("top k, ranked on other skeletons", COLORS["blue"]),
    "matched": ("k at random, matched", COLORS["orange"]),
    "random": ("k at random", COLORS["grey"]),
}
_LAYERS = {
    "layer": ("one layer", COLORS["vermilion"]),
    "up_to_layer": ("all layers up to it", COLORS["green"]),
    "from_layer": ("all layers from it on", COLORS["purple"]),
}
_SEGMENTS = ("field", "session_rest", "filler_before", "policy", "filler", "conversation", "task", "cue", "delimiter")


def draw_suffix_concentration(panels: Sequence[Panel]) -> Figure:
    """Doses, top positions, layers and shares by segment from top to bottom; one column for each model."""
    with styled():
        figure, (doses, tops, layers, shares) = panel_grid(panels, heights=(2.0, 2.0, 2.0, 2.5))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for row, curves, marker in ((doses, _DOSES, "o"), (tops, _TOP, "s"), (layers, _LAYERS, "^")):
                levels(row[column], 0.0, 1.0)
                for selection, (label, color) in curves.items():
                    draw_dose(row[column], panel, selection, "recovery", color=color, label=label, marker=marker)
            doses[column].set_xlabel("transplanted share of tokens (%)")
            dose_axis(tops[column], sizes_of(panel, "top_held_out", "recovery"), "transplanted positions k")
            numbers = sizes_of(panel, "layer", "recovery")
            layers[column].set_xticks(numbers[:: max(1, len(numbers) // 6)])
            layers[column].set_xlabel("layer")
            _draw_shares(shares[column], panel)
        for row in (doses, tops, layers):
            row[0].set_ylabel("recovery of\nthe new decision")
        figure.suptitle("Which cache entries carry a changed field's effect?", fontsize=11)
        measured = first_measured(panels)
        if measured is not None:
            lines = [line for row in (doses, tops, layers) for line in row[measured].get_legend_handles_labels()[0]]
            key = dose_key({}, paper=any(panel.paper for panel in panels))
            figure.legend(handles=[*lines, *key], loc="outside lower center", ncols=3)
    return figure


def suffix_concentration_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Suffixes (solid) and prefixes (dashed) of growing length, all models."""
    levels(axes, 0.0, 1.0)
    draw_doses_by_model(axes, panels, ("suffix", "recovery"), ("prefix", "recovery"))
    axes.set_xlabel("transplanted share of tokens (%)")
    axes.set_ylabel("recovery")
    axes.set_title("Last tokens; dashed: first tokens")


def _draw_shares(axes: Axes, panel: Panel) -> None:
    """Share of the positive recovery of single positions, and the share of tokens, for each segment."""
    names = {name: f"{name}.share" if name == "delimiter" else f"mass.{name}" for name in _SEGMENTS}
    shown = [name for name, effect in names.items() if effect in panel.effects]
    for place, name in enumerate(shown):
        mass = panel.effects[names[name]]
        density = panel.effects.get(f"{name}.density" if name == "delimiter" else f"density.{name}")
        color = COLORS["vermilion"] if name == "delimiter" else COLORS["blue"]
        axes.barh(place, mass.estimate, 0.62, color=color, alpha=0.8, zorder=2)
        axes.plot([mass.low, mass.high], [place, place], color=COLORS["ink"], lw=1.2, zorder=3)
        if density is not None and density.estimate > 0:
            axes.plot(mass.estimate / density.estimate, place, "|", ms=11, mew=1.8, color=COLORS["ink"], zorder=4)
        if names[name] in panel.paper:
            axes.plot(panel.paper[names[name]], place, "D", ms=5, mfc="white", mec=COLORS["ink"], mew=1.2, zorder=5)
    axes.set_yticks(range(len(shown)), [name.replace("_", " ") for name in shown])
    axes.tick_params(axis="y", labelleft=True, length=0)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of single-position recovery\n(stroke: share of tokens)")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
