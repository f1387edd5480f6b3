"""The figure of the tool_calls probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import COLORS, draw_effects, effect_key, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "full_prefill": ("full", COLORS["ink"]),
    "splice_none": ("none", COLORS["vermilion"]),
    "splice_neutral": ("neu-\ntral", COLORS["blue"]),
    "splice_real": ("real", COLORS["green"]),
    "seam_8_none": ("none\n+8", COLORS["vermilion"]),
    "seam_8_neutral": ("neu-\ntral\n+8", COLORS["blue"]),
    "seam_8_real": ("real\n+8", COLORS["green"]),
    "wrong_chunk": ("other\ntools", COLORS["grey"]),
    "removed": ("no\ntools", COLORS["grey"]),
}
_ROWS = (
    ("accuracy", "correct", "right calls\n(name and all arguments)"),
    ("name_right", "name_right", "right names"),
    ("agreement", "agrees", "the full prefill's call"),
)


def draw_tool_calls(panels: Sequence[Panel]) -> Figure:
    """Right calls, right names and agreement of every arm; one column for each model."""
    with styled():
        figure, grid = panel_grid(panels, heights=(2.1,) * len(_ROWS))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for row, (metric, source, _) in zip(grid, _ROWS, strict=True):
                names = {f"{arm}.{metric}": look for arm, look in _ARMS.items() if f"{arm}.{metric}" in panel.effects}
                draw_effects(row[column], panel, names, _dots(panel.rows, metric, source))
                row[column].tick_params(axis="x", labelsize=6.5)
                row[column].set_ylim(-0.05, 1.08)
                levels(row[column], 1.0)
        first = first_measured(panels)
        if first is not None:
            for row, (_, _, label) in zip(grid, _ROWS, strict=True):
                row[first].set_ylabel(label, fontsize=8)
            figure.legend(handles=effect_key("one tool"), loc="outside lower center", ncols=4 if len(panels) > 1 else 2)
        figure.suptitle("Tool definitions compiled behind nothing, a neutral line, the real prompt", fontsize=11)
    return figure


def tool_calls_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Right calls of full prefill, splice, seam and floors, all models."""
    names = {
        "full_prefill": "full",
        "splice_none": "splice",
        "seam_8_none": "splice,\nseam 8",
        "splice_neutral": "splice,\nheader",
        "wrong_chunk": "other\ntools",
    }
    draw_by_model(axes, panels, {f"{arm}.accuracy": label for arm, label in names.items()}, (0.0, 1.0))
    axes.tick_params(axis="x", labelsize=6.5)
    axes.set_ylim(-0.05, 1.08)
    axes.set_ylabel("right calls")
    axes.set_title("Tool calls, name and arguments")


def _dots(rows: pd.DataFrame, metric: str, column: str) -> dict[str, pd.Series]:
    if rows.empty or column not in rows:
        return {}
    return {
        f"{arm}.{metric}": part[column].astype(float).groupby(part["skeleton"]).mean()
        for arm, part in rows.groupby("arm")
    }
