"""The figure of the scrub probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.legacy.doses import dose_axis, draw_dose, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, draw_effects, effect_key, panel_grid, recovery_by_skeleton, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DRIFT = {
    "note_same.drift": ("note", COLORS["blue"]),
    "rest_same.drift": ("rest", COLORS["green"]),
    "all_same.drift": ("both", COLORS["sky"]),
    "hypothesis.drift": ("whole\nclaim", COLORS["purple"]),
    "anything.drift": ("any-\nthing", COLORS["grey"]),
}
_INTERCHANGE = {
    "note_opposite.recovery": ("note", COLORS["blue"]),
    "rest_opposite.recovery": ("rest", COLORS["green"]),
    "note_opposite_other_wording.recovery": ("note,\nreworded", COLORS["blue"]),
    "rest_opposite_other_wording.recovery": ("rest,\nreworded", COLORS["green"]),
}
_SWEEP = {
    "note_opposite": ("note", COLORS["blue"]),
    "rest_opposite": ("rest", COLORS["green"]),
    "in_sample_note_opposite": ("note, ranked on the prompt itself", COLORS["sky"]),
}
_SHORT = {
    "note_opposite.recovery": "note,\nother concl.",
    "rest_opposite.recovery": "rest,\nother concl.",
    "hypothesis.recovery": "whole\nclaim",
    "anything.recovery": "any-\nthing",
}


def draw_scrub(panels: Sequence[Panel]) -> Figure:
    """Donors with the same conclusion above, with the other below, then the note's size; one column for each model."""
    from matplotlib.lines import Line2D

    with styled():
        figure, (top, middle, bottom) = panel_grid(panels, heights=(2.0, 2.1, 2.0))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            levels(top[column], 0.0)
            draw_effects(top[column], panel, _DRIFT, _by_skeleton(panel.rows, _DRIFT))
            levels(middle[column], 0.0, 1.0)
            draw_effects(middle[column], panel, _INTERCHANGE, _by_skeleton(panel.rows, _INTERCHANGE))
            levels(bottom[column], 0.0, 1.0)
            for selection, (_, color) in _SWEEP.items():
                draw_dose(bottom[column], panel, selection, "recovery", color=color)
            dose_axis(bottom[column], sizes_of(panel, "note_opposite", "recovery"), "positions in the note")
        top[0].set_ylabel("drift, share of the gap\n(same conclusion)")
        middle[0].set_ylabel("recovery of the\nother conclusion")
        bottom[0].set_ylabel("recovery of the\nother conclusion")
        figure.suptitle("Entries resampled from other scenarios: is the conclusion all that is read?", fontsize=11)
        lines = [Line2D([], [], marker="o", ms=3.5, label=label, color=color) for label, color in _SWEEP.values()]
        figure.legend(handles=[*effect_key("one skeleton"), *lines], loc="outside lower center", ncols=4)
    return figure


def scrub_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Recovery of the other conclusion by what was resampled, all models side by side."""
    levels(axes, 0.0, 1.0)
    draw_by_model(axes, panels, _SHORT)
    axes.set_ylabel("recovery")
    axes.set_title("Scrubbed across scenarios")


def _by_skeleton(rows: pd.DataFrame, effects: Mapping[str, tuple[str, str]]) -> dict[str, pd.Series]:
    dots = {}
    for name in effects:
        arm, _, metric = name.partition(".")
        part = rows[rows["intervention"] == arm]
        shift = part["margin"] - part["m_base"]
        dots[name] = recovery_by_skeleton(part, shift.abs() if metric == "drift" else shift)
    return dots
