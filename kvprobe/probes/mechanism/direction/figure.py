"""The figure of the direction probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import (
    COLORS,
    draw_effects,
    draw_profile,
    effect_key,
    first_measured,
    panel_grid,
    recovery_by_skeleton,
    styled,
)
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EFFECTS = {
    "full.recovery": ("everything", COLORS["grey"]),
    "along.recovery": ("difference of means", COLORS["blue"]),
    "das.recovery": ("optimised (DAS)", COLORS["blue"]),
    "logistic.recovery": ("logistic probe", COLORS["blue"]),
    "orthogonal.recovery": ("all the rest", COLORS["green"]),
    "random.recovery": ("random", COLORS["vermilion"]),
    "shuffled.recovery": ("shuffled labels", COLORS["vermilion"]),
    "other_concept.recovery": ("case order", COLORS["vermilion"]),
    "component.recovery": ("first component", COLORS["vermilion"]),
    "orthogonal_matched.recovery": ("the rest, as long", COLORS["vermilion"]),
    "necessity.drop": ("lost without it", COLORS["purple"]),
}
_LINES = {
    "full": ("everything", COLORS["grey"], "s"),
    "along": ("difference of means", COLORS["blue"], "o"),
}
_SHORT = {
    "full.recovery": "every-\nthing",
    "along.recovery": "along",
    "random.recovery": "random",
    "orthogonal.recovery": "the rest",
    "necessity.drop": "lost\nwithout",
}


def draw_direction(panels: Sequence[Panel]) -> Figure:
    """Recovery by what is exchanged above, by layer below; one column for each model."""
    with styled():
        figure, (top, bottom) = panel_grid(panels, heights=(3.4, 1.7))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            levels(top[column], 0.0, 1.0)
            draw_effects(top[column], panel, _EFFECTS, {name: _by_skeleton(panel.rows, name) for name in _EFFECTS})
            top[column].tick_params(axis="x", labelsize=7.5, labelrotation=90)
            levels(bottom[column], 0.0, 1.0)
            draw_profile(bottom[column], _profiles(panel.rows))
            bottom[column].set_xlabel("after block")
        top[0].set_ylabel("recovery of the new decision\n(last: share of it lost)")
        bottom[0].set_ylabel("recovery")
        figure.suptitle("Does one direction of the notes carry the conclusion to other skeletons?", fontsize=11)
        measured = first_measured(panels)
        if measured is not None:
            lines = bottom[measured].get_legend_handles_labels()[0]
            figure.legend(
                handles=[*effect_key("one skeleton")[:3], *lines],
                loc="outside lower center",
                ncols=5,
                title="Vermilion: controls as long as the step along the difference of means, towards the donor.",
            )
    return figure


def direction_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Recovery of everything, of the direction and of random ones, all models side by side."""
    levels(axes, 0.0, 1.0)
    draw_by_model(axes, panels, _SHORT)
    axes.set_ylabel("recovery")
    axes.set_title("One direction of the notes")


def _by_skeleton(rows: pd.DataFrame, effect: str) -> pd.Series:
    part = rows[(rows["intervention"] == effect.rsplit(".", 1)[0]) & rows["chosen"].astype(bool)]
    lost, gained = part["m_donor"] - part["margin"], part["margin"] - part["m_base"]
    shift = lost if effect.endswith(".drop") else gained
    return recovery_by_skeleton(part, shift)


def _profiles(rows: pd.DataFrame) -> Mapping[str, tuple[pd.Series, str, str]]:
    parts = rows[rows["intervention"].isin(_LINES)]
    sums = parts.assign(shift=parts["margin"] - parts["m_base"], gap=parts["m_donor"] - parts["m_base"])
    totals = sums.groupby(["intervention", "layer"])[["shift", "gap"]].sum()
    recovery = totals["shift"] / totals["gap"]
    return {label: (recovery[name], color, marker) for name, (label, color, marker) in _LINES.items()}
