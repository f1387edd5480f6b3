"""Several models in one axes, as the panels of a section's figure show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.probes.base import Panel
from kvprobe.report.doses import draw_dose
from kvprobe.report.figures import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL_COLORS = tuple(COLORS[name] for name in ("blue", "vermilion", "green", "purple", "orange", "sky"))
"""Colours of the models where several share one axes."""


def color_of(number: int) -> str:
    """The colour of the `number`-th model, the same in all axes of a figure."""
    return MODEL_COLORS[number % len(MODEL_COLORS)]


def model_color(panels: Sequence[Panel], panel: Panel) -> str:
    """The colour of one of the models, by its place among all, so that an unmeasured one shifts no other's colour."""
    return color_of([each.model for each in panels].index(panel.model))


def draw_doses_by_model(axes: Axes, panels: Sequence[Panel], solid: tuple[str, str], dashed: tuple[str, str]) -> None:
    """Two curves `(selection, metric)` of each measured model over the size k, in its colour; see `draw_dose`."""
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        draw_dose(axes, panel, *solid, color=color, label=panel.model)
        draw_dose(axes, panel, *dashed, color=color, ls="--", marker="")


def draw_by_model(
    axes: Axes, panels: Sequence[Panel], labels: Mapping[str, str], limits: tuple[float, float] = (-0.5, 1.5)
) -> None:
    """Effects side by side with their intervals, models beside each other in their colours.

    The paper's value, where there is one, is an open diamond of the model's colour.

    Args:
        axes: to draw on.
        panels: the models; one that was not measured keeps its place and its colour free.
        labels: on the axis, by the effect's name.
        limits: intervals are drawn no further than this, so that an unbounded one does not stretch the axis.
    """
    step = 0.7 / max(1, len(panels))
    for number, panel in enumerate(panels):
        offset, color = step * (number - (len(panels) - 1) / 2), color_of(number)
        known = {place + offset: panel.effects[name] for place, name in enumerate(labels) if name in panel.effects}
        if not known:
            continue
        estimates = np.array([effect.estimate for effect in known.values()])
        low = np.clip([effect.low for effect in known.values()], *limits)
        high = np.clip([effect.high for effect in known.values()], *limits)
        reach = np.maximum([estimates - low, high - estimates], 0.0)
        axes.errorbar(list(known), estimates, yerr=reach, fmt="o", ms=4, lw=1.2, color=color, label=panel.model)
        paper = {place + offset: panel.paper[name] for place, name in enumerate(labels) if name in panel.paper}
        axes.plot(list(paper), list(paper.values()), "D", ms=6, mfc="none", mec=color, mew=1.0, zorder=1)
    axes.set_xticks(range(len(labels)), list(labels.values()))
