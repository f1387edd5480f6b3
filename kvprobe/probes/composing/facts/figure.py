"""The figure of the facts probe."""

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
    "full_prefill": ("full\nprefill", COLORS["ink"]),
    "splice_none": ("splice,\nno header", COLORS["vermilion"]),
    "splice_neutral": ("splice,\nheader", COLORS["blue"]),
    "seam_8": ("seam\nof 8", COLORS["orange"]),
    "removed": ("no\nlist", COLORS["grey"]),
}
_PLACES = {"early": "right after the opening line", "late": "right before the question"}


def draw_facts(panels: Sequence[Panel]) -> Figure:
    """Exact matches of every arm, the list early (top) and late (bottom); one column for each model."""
    with styled():
        figure, grid = panel_grid(panels, heights=(2.4, 2.4))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for row, place in zip(grid, _PLACES, strict=True):
                names = {f"{place}.{arm}.exact_match": (label, color) for arm, (label, color) in _ARMS.items()}
                draw_effects(row[column], panel, names, _dots(panel, place))
                row[column].tick_params(axis="x", labelsize=6.5)
                row[column].set_ylim(-0.05, 1.08)
                levels(row[column], 1.0)
        first = first_measured(panels)
        if first is not None:
            for row, (place, where) in zip(grid, _PLACES.items(), strict=True):
                row[first].set_ylabel(f"right answers, facts {place}\n({where})", fontsize=8)
            figure.legend(
                handles=effect_key("one scenario"), loc="outside lower center", ncols=4 if len(panels) > 1 else 2
            )
        figure.suptitle("Facts compiled apart: is the asked one found?", fontsize=11)
    return figure


def facts_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Exact matches of full prefill, splice and floor, early and late, all models."""
    labels = {
        f"{place}.{arm}.exact_match": f"{name}\n{place}"
        for arm, name in (("full_prefill", "full"), ("splice_none", "splice"), ("removed", "no list"))
        for place in _PLACES
    }
    draw_by_model(axes, panels, labels, (0.0, 1.0))
    axes.tick_params(axis="x", labelsize=6.5)
    axes.set_ylim(-0.05, 1.08)
    axes.set_ylabel("right answers")
    axes.set_title("Facts, early and late")


def _dots(panel: Panel, place: str) -> dict[str, pd.Series]:
    rows = panel.rows
    if rows.empty or "insertion" not in rows:
        return {}
    here = rows[rows["insertion"] == place]
    found = {
        f"{place}.{arm}.exact_match": part["exact"].astype(float).groupby(part["skeleton"]).mean()
        for arm, part in here.groupby("arm")
    }
    once = here[here["arm"] == "removed"]
    found[f"{place}.full_prefill.exact_match"] = once["reference_exact"].astype(float).groupby(once["skeleton"]).mean()
    return found
