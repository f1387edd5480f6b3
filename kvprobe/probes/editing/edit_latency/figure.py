"""The figure of the edit latency probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.legacy.doses import dose_axis, draw_dose, sizes_of
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_doses_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "field_only": ("field only", COLORS["sky"]),
    "erratum": ("erratum", COLORS["vermilion"]),
    "field_and_erratum": ("field and erratum", COLORS["purple"]),
    "cacheblend": ("CacheBlend-style, 15%", COLORS["orange"]),
    "hoist_to_end": ("hoist to the end", COLORS["grey"]),
    "full_downstream": ("full downstream", COLORS["green"]),
}
_ROWS = {"seconds_ratio": "time", "flop_share": "FLOPs"}
_AXIS = "tokens of the prompt"


def draw_edit_latency(panels: Sequence[Panel]) -> Figure:
    """Time and FLOPs of each edit as a share of a full reprefill, over the length of the prompt."""
    with styled():
        figure, rows = panel_grid(panels, heights=(2.8, 2.8))
        for row, (metric, label) in zip(rows, _ROWS.items(), strict=True):
            for axes, panel in zip(row, panels, strict=True):
                if not panel.effects:
                    continue
                for arm, (_, color) in _ARMS.items():
                    draw_dose(axes, panel, arm, metric, color=color)
                dose_axis(axes, sizes_of(panel, "erratum", metric), _AXIS)
                axes.axhline(1, color=COLORS["ink"], lw=0.8, ls="--", zorder=1)
                axes.set_ylim(0, 1.3)
            first = first_measured(panels)
            if first is not None:
                row[first].set_ylabel(f"{label} (share of a full reprefill)")
        figure.legend(handles=_key(), loc="outside lower center", ncols=3 if len(panels) > 1 else 2)
        figure.suptitle("What an edit costs, by the length of the prompt", fontsize=11)
    return figure


def edit_latency_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Time of an erratum (solid) and of an in-place edit (dashed) over the length, all models."""
    draw_doses_by_model(axes, panels, ("erratum", "seconds_ratio"), ("field_only", "seconds_ratio"))
    sizes = sorted({size for panel in panels for size in sizes_of(panel, "erratum", "seconds_ratio")})
    dose_axis(axes, sizes, _AXIS)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time / reprefill")
    axes.set_title("Time of an erratum (solid), in place (dashed)")


def _key() -> list[object]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], marker="o", ms=4, color=color, label=label) for label, color in _ARMS.values()]
