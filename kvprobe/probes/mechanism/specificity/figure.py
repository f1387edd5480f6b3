"""The figure of the specificity probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.legacy.doses import dose_axis, dose_key, draw_dose, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, panel_grid, styled
from kvprobe.figures.legacy.models import draw_doses_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = {
    "in_sample": ("ranked on the pair itself", COLORS["sky"]),
    "held_out": ("ranked on other skeletons", COLORS["blue"]),
    "matched": ("matched random sets", COLORS["orange"]),
    "random": ("random sets", COLORS["grey"]),
}


def draw_specificity(panels: Sequence[Panel]) -> Figure:
    """Recovery over the number of patched positions; one column for each model."""
    with styled():
        figure, (row,) = panel_grid(panels, heights=(3.0,))
        for axes, panel in zip(row, panels, strict=True):
            if not panel.effects:
                continue
            levels(axes, 0.0, 1.0)
            for selection, (_, color) in _CURVES.items():
                draw_dose(axes, panel, selection, "recovery", color=color)
            dose_axis(axes, sizes_of(panel, "held_out", "recovery"))
        row[0].set_ylabel("recovery of the new decision")
        figure.suptitle("Do a few particular positions carry the effect?", fontsize=11)
        paper = any(panel.paper for panel in panels)
        handles = dose_key(dict(_CURVES.values()), paper=paper)
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def specificity_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Held-out sets (solid) against matched random sets (dashed), all models."""
    levels(axes, 0.0, 1.0)
    draw_doses_by_model(axes, panels, ("held_out", "recovery"), ("matched", "recovery"))
    for panel in (panel for panel in panels if panel.effects):
        dose_axis(axes, sizes_of(panel, "held_out", "recovery"))
    axes.set_ylabel("recovery")
    axes.set_title("Held-out top k; dashed: matched random k")
