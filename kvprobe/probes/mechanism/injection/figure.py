"""The figure of the injection probe."""

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
    "random": ("random sets", COLORS["grey"]),
}
_METRICS = {"recovery": "shift of the margin,\nshare of the gap", "flip_rate": "share of\ndecisions turned"}


def draw_injection(panels: Sequence[Panel]) -> Figure:
    """The margin's shift above and the turned decisions below, by dose; one column for each model."""
    with styled():
        figure, rows = panel_grid(panels, heights=(2.2, 2.2))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for axes, metric in zip((row[column] for row in rows), _METRICS, strict=True):
                levels(axes, 0.0, 1.0)
                for selection, (_, color) in _CURVES.items():
                    draw_dose(axes, panel, selection, metric, color=color)
                whole = panel.effects[f"all_notes.{metric}"].estimate
                axes.axhline(whole, color=COLORS["vermilion"], lw=1.3, zorder=2)
            dose_axis(rows[0][column], sizes_of(panel, "held_out", "recovery"), "")
            dose_axis(rows[1][column], sizes_of(panel, "held_out", "recovery"), "injected positions")
        for row, label in zip(rows, _METRICS.values(), strict=True):
            row[0].set_ylabel(label)
        figure.suptitle("Does a decision follow injected notes of the other conclusion?", fontsize=11)
        curves = {"all notes": COLORS["vermilion"], **dict(_CURVES.values())}
        handles = dose_key(curves, paper=any(panel.paper for panel in panels))
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def injection_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """The margin's shift (solid) and the turned decisions (dashed) by held-out dose, all models."""
    levels(axes, 0.0, 1.0)
    draw_doses_by_model(axes, panels, ("held_out", "recovery"), ("held_out", "flip_rate"))
    for panel in (panel for panel in panels if panel.effects):
        dose_axis(axes, sizes_of(panel, "held_out", "recovery"), "injected positions")
    axes.set_ylabel("share")
    axes.set_title("Injected notes: shift; dashed: flips")
