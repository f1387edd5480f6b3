"""The figure of the dissociation probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import COLORS, draw_effects, effect_key, panel_grid, recovery_by_skeleton, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OF_PAPER = {
    "trigger_only.recovery": ("trigger\nonly", COLORS["vermilion"]),
    "notes.recovery": ("notes\nafter it", COLORS["blue"]),
    "full_downstream.recovery": ("both", COLORS["grey"]),
}
_OF_SQUARE = {
    "other_field_notes.recovery": ("notes, other\nconclusion,\nsame rule", COLORS["blue"]),
    "same_conclusion_notes.recovery": ("notes, same\nconclusion,\nother content", COLORS["green"]),
    "same_conclusion_tokens.recovery": ("field and\ntrigger of\nthe latter", COLORS["vermilion"]),
}
_SHORT = {
    "trigger_only.recovery": "trigger\nonly",
    "notes.recovery": "notes",
    "other_field_notes.recovery": "other\nconclusion",
    "same_conclusion_notes.recovery": "same\nconclusion",
}


def draw_dissociation(panels: Sequence[Panel]) -> Figure:
    """Recovery from the donor above, from the square's two other cells below; one column for each model."""
    with styled():
        figure, (top, bottom) = panel_grid(panels, heights=(2.3, 2.5))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for axes, effects in ((top[column], _OF_PAPER), (bottom[column], _OF_SQUARE)):
                levels(axes, 0.0, 1.0)
                draw_effects(axes, panel, effects, {name: _by_skeleton(panel.rows, name) for name in effects})
            bottom[column].tick_params(axis="x", labelsize=7.5)
        top[0].set_ylabel("recovery of the\nother decision,\nother trigger")
        bottom[0].set_ylabel("recovery of the\nother decision,\nother field")
        figure.suptitle("Do notes hold the conclusion, or the content it was drawn from?", fontsize=11)
        figure.legend(handles=effect_key("one skeleton"), loc="outside lower center", ncols=4)
    return figure


def dissociation_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Recovery by what was transplanted, all models side by side."""
    levels(axes, 0.0, 1.0)
    draw_by_model(axes, panels, _SHORT)
    axes.set_ylabel("recovery")
    axes.set_title("Notes: conclusion or content?")


def _by_skeleton(rows: pd.DataFrame, effect: str) -> pd.Series:
    part = rows[(rows["intervention"] == effect.removesuffix(".recovery")) & rows["source_right"].astype(bool)]
    return recovery_by_skeleton(part)
