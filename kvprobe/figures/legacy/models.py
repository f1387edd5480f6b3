"""Several models in one axes, by the names of effects; goes when the last figure is a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.by_model import MODEL_COLORS, color_of, draw_by_model, model_color
from kvprobe.figures.legacy.doses import draw_dose
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MODEL_COLORS", "color_of", "draw_by_model", "draw_doses_by_model", "model_color"]


def draw_doses_by_model(axes: Axes, panels: Sequence[Panel], solid: tuple[str, str], dashed: tuple[str, str]) -> None:
    """Two curves `(selection, metric)` of each measured model over the size k, in its colour; see `draw_dose`."""
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        draw_dose(axes, panel, *solid, color=color, label=panel.model)
        draw_dose(axes, panel, *dashed, color=color, ls="--", marker="")
