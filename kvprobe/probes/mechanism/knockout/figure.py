"""The figure of the knockout probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.legacy.doses import dose_key, draw_dose, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, draw_effects, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_doses_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CACHES = {
    "stale": ("stale cache", COLORS["grey"]),
    "field_only": ("field-only cache", COLORS["vermilion"]),
    "new": ("new cache", COLORS["blue"]),
    "swapped": ("stale, rule swapped", COLORS["orange"]),
}
_KEYS = {
    "attention": ("most attended hidden", COLORS["vermilion"]),
    "effect": ("most effect, other skeletons", COLORS["blue"]),
    "equal_mass": ("as much attention, random", COLORS["green"]),
    "random": ("as many, random", COLORS["grey"]),
    "low_effect": ("least effect", COLORS["sky"]),
}
_BANDS = {
    f"{band}_layers.field_only.follows_new": (band, COLORS["vermilion"]) for band in ("early", "mid", "late", "all")
}


def draw_knockout(panels: Sequence[Panel]) -> Figure:
    """Decisions by dose and cache, what is erased by key set, and layer bands; one column for each model."""
    with styled():
        figure, (decisions, erased, bands) = panel_grid(panels, heights=(2.2, 2.2, 2.0))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            _draw_decisions(decisions[column], panel)
            levels(erased[column], 0.0, 1.0)
            for keys, (label, color) in _KEYS.items():
                draw_dose(erased[column], panel, keys, "erased", color=color, label=label, marker="s")
            for axes in (decisions[column], erased[column]):
                axes.set_xlabel("hidden share of positions (%)")
            levels(bands[column], 0.0, 1.0)
            draw_effects(bands[column], panel, _BANDS, {name: _by_skeleton(panel.rows, name) for name in _BANDS})
            bands[column].set_xlabel("layers in which all are hidden")
        decisions[0].set_ylabel("decisions for\nthe new value")
        erased[0].set_ylabel("erased share of the gap\nbetween new and stale")
        bands[0].set_ylabel("decisions for the new\nvalue, field only")
        figure.suptitle("What is decided when the decision token cannot see the notes?", fontsize=11)
        measured = first_measured(panels)
        if measured is not None:
            lines = [line for row in (decisions, erased) for line in row[measured].get_legend_handles_labels()[0]]
            key = dose_key({}, paper=any(panel.paper for panel in panels))
            figure.legend(handles=[*lines, *key], loc="outside lower center", ncols=4)
    return figure


def knockout_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """What is erased by hiding the positions of high effect (solid) or as much attention (dashed), all models."""
    levels(axes, 0.0, 1.0)
    draw_doses_by_model(axes, panels, ("effect", "erased"), ("equal_mass", "erased"))
    axes.set_xlabel("hidden share of positions (%)")
    axes.set_ylabel("erased share of the gap")
    axes.set_title("Notes hidden; dashed: equal attention")


def _draw_decisions(axes: Axes, panel: Panel) -> None:
    """Decisions for the new value on each cache, by the share of the most attended positions that is hidden."""
    levels(axes, 0.0, 1.0)
    for cache, (label, color) in _CACHES.items():
        draw_dose(axes, panel, "attention", f"{cache}.follows_new", color=color, label=label)
        free, least = panel.effects.get(f"none.{cache}.follows_new"), sizes_of(panel, "attention", "erased")
        if free is not None and least:
            first = panel.effects[f"attention_{least[0]}.{cache}.follows_new"]
            axes.plot([0, least[0]], [free.estimate, first.estimate], "o:", ms=3.5, lw=1.2, color=color, zorder=2)


def _by_skeleton(rows: pd.DataFrame, effect: str) -> pd.Series:
    name, cache, _ = effect.split(".")
    part = rows[(rows["intervention"] == name) & (rows["cache"] == cache)]
    return (part["margin"] > 0).astype(float).groupby(part["skeleton"]).mean()
