"""The figure of the long trajectory probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvprobe.figures.decision_rates import rates_by_model
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.panel import Panel
from kvprobe.probes.system.long_trajectory.probe import FLOOR, METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# As in the frontier's figure, where the methods are the same.
_METHODS = {
    "full_downstream": ("full downstream", COLORS["ink"], "-"),
    "field_only": ("field only", COLORS["sky"], "-"),
    "errata_kept": ("errata, all kept", COLORS["purple"], "-"),
    "erratum": ("erratum, current alone", COLORS["vermilion"], "-"),
    "field_and_erratum": ("field + erratum", COLORS["orange"], "-"),
    "periodic_reprefill": ("field only, periodic prefill", COLORS["green"], "--"),
}
_FLOOR = ("floor: errata kept, cached against prefilled", COLORS["grey"], ":")
_BINS = 10


def draw_long_trajectory(panels: Sequence[Panel]) -> Figure:
    """Agreement and margin error over the turns, by method; a column for each model and two rows for each period."""
    periods = sorted({int(p) for panel in panels if len(panel.rows) for p in panel.rows["period"].unique()})
    with styled():
        figure, grid = panel_grid(panels, heights=[1.9] * max(2, 2 * len(periods)))
        for place, period in enumerate(periods):
            for column, panel in enumerate(panels):
                if panel.effects:
                    rows = panel.rows[panel.rows["period"] == period]
                    _draw_lines(grid[2 * place][column], rows, "agrees")
                    _draw_lines(grid[2 * place + 1][column], rows, "margin_error")
            first = first_measured(panels)
            if first is not None:
                grid[2 * place][first].set_ylabel(f"change every {_turns(period)}\nagreement with oracle")
                grid[2 * place][first].set_ylim(-0.04, 1.06)
                grid[2 * place + 1][first].set_ylabel(f"change every {_turns(period)}\nmargin error (logits)")
                grid[2 * place + 1][first].set_ylim(bottom=0)
        for axes in grid[-1]:
            axes.set_xlabel("turn")
        if first_measured(panels) is not None:
            figure.legend(handles=_key(), loc="outside lower center", ncols=2 if len(panels) == 1 else 4)
        figure.suptitle("Many turns on one cache while the state keeps changing", fontsize=11)
    return figure


def long_trajectory_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Agreement over the last third of the turns by method, all models side by side."""
    periods = sorted({int(p) for panel in panels if len(panel.rows) for p in panel.rows["period"].unique()})
    period = periods[-1] if periods else 0
    labels = {f"{name}.period_{period}.last_third.agreement": _METHODS[name][0] for name in METHODS}
    rates_by_model(axes, panels, labels, "Long trajectories, last third", "agreement with the oracle")


def _turns(period: int) -> str:
    return "turn" if period == 1 else f"{period} turns"


def _draw_lines(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    """Means over trajectories and a tenth of the turns, one line for each method."""
    length = int(rows["turn"].max()) + 1
    size = max(1, -(-length // _BINS))
    # Methods that never err lie on one another: later ones are thinner, so that all can be seen.
    for number, (name, (_, color, style)) in enumerate({**_METHODS, FLOOR: _FLOOR}.items()):
        part = rows[rows["method"] == name]
        if part.empty:
            continue
        means = part[column].astype(float).groupby(part["turn"] // size).mean()
        turns = means.index * size + (size - 1) / 2
        axes.plot(turns, means, ls=style, lw=4 - 0.45 * number, color=color, zorder=3, clip_on=False)
    axes.set_xlim(0, length - 1)


def _key() -> list[Any]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=color, ls=style, label=label) for label, color, style in [*_METHODS.values(), _FLOOR]]
