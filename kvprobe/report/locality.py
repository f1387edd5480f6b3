"""The figure of the locality probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.probes.base import Panel
from kvprobe.report.doses import levels
from kvprobe.report.figures import (
    COLORS,
    draw_effects,
    draw_profile,
    effect_key,
    first_measured,
    panel_grid,
    recovery_by_skeleton,
    styled,
)
from kvprobe.report.models import draw_by_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EFFECTS = {
    "field_only.recovery": ("field\nonly", COLORS["vermilion"]),
    "downstream_only.recovery": ("downstream\nonly", COLORS["blue"]),
    "full_downstream.recovery": ("both", COLORS["grey"]),
}
_REGIONS = {
    "before": ("before the field", COLORS["green"], "s"),
    "field": ("field", COLORS["vermilion"], "o"),
    "downstream": ("downstream", COLORS["blue"], "^"),
}


def draw_locality(panels: Sequence[Panel]) -> Figure:
    """Recovery by transplanted entries above, the cache's change by layer below; one column for each model."""
    with styled():
        figure, (top, bottom) = panel_grid(panels, heights=(2.6, 1.9))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            _draw_recovery(top[column], panel)
            draw_profile(bottom[column], _profiles(panel.rows))
        top[0].set_ylabel("recovery of the new decision")
        bottom[0].set_ylabel("relative change\nof keys and values")
        figure.suptitle("Which cache entries carry a changed field's effect on the decision?", fontsize=11)
        measured = first_measured(panels)
        if measured is not None:
            key = effect_key("one skeleton")
            lines = bottom[measured].get_legend_handles_labels()[0]
            figure.legend(handles=[*key, *lines], loc="outside lower center", ncols=4)
    return figure


def locality_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Recovery by transplanted entries, all models side by side."""
    levels(axes, 0.0, 1.0)
    draw_by_model(axes, panels, {name: label for name, (label, _) in _EFFECTS.items()})
    axes.set_ylabel("recovery")
    axes.set_title("The effect sits after the field")


def _draw_recovery(axes: Axes, panel: Panel) -> None:
    levels(axes, 0.0, 1.0)
    draw_effects(axes, panel, _EFFECTS, {name: _by_skeleton(panel.rows, name) for name in _EFFECTS})


def _by_skeleton(rows: pd.DataFrame, effect: str) -> pd.Series:
    part = rows[rows["intervention"] == effect.removesuffix(".recovery")]
    return recovery_by_skeleton(part)


def _profiles(rows: pd.DataFrame) -> dict[str, tuple[pd.Series, str, str]]:
    changes = rows[rows["measurement"] == "cache_change"]
    relative = changes.assign(change=changes[["relative_keys", "relative_values"]].mean(axis=1))
    means = relative.groupby(["region", "layer"])["change"].mean()
    regions = set(means.index.get_level_values("region"))
    return {
        label: (means[region], color, marker)
        for region, (label, color, marker) in _REGIONS.items()
        if region in regions
    }
