"""Several models in one axes, as the panels of a section's figure show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.figures.doses import dose_axis, draw_dose
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS, levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL_COLORS = tuple(COLORS[name] for name in ("blue", "vermilion", "green", "purple", "orange", "sky"))
"""Colours of the models where several share one axes."""
_MARKERS = "os^vPX"


def color_of(number: int) -> str:
    """The colour of the `number`-th model, the same in all axes of a figure."""
    return MODEL_COLORS[number % len(MODEL_COLORS)]


def marker_of(number: int) -> str:
    """The marker of the `number`-th model, so that models are told apart without colour too."""
    return _MARKERS[number % len(_MARKERS)]


def model_marker(panels: Sequence[Panel], panel: Panel) -> str:
    """The marker of one of the models, by its place among all."""
    return marker_of([each.model for each in panels].index(panel.model))


def model_color(panels: Sequence[Panel], panel: Panel) -> str:
    """The colour of one of the models, by its place among all, so that an unmeasured one shifts no other's colour."""
    return color_of([each.model for each in panels].index(panel.model))


def draw_doses_by_model(axes: Axes, panels: Sequence[Panel], solid: tuple[str, str], dashed: tuple[str, str]) -> None:
    """Two curves `(condition, metric)` of each measured model over their parameter, in its colour; see `draw_dose`.

    Where the second has a single size, it is a cross; the paper's values of the second are thin diamonds.
    """
    for panel in (panel for panel in panels if panel.effects):
        color, marker = model_color(panels, panel), model_marker(panels, panel)
        draw_dose(axes, panel, *solid, color=color, label=panel.model, marker=marker)
        single = len(panel.curve(*dashed)) == 1
        draw_dose(axes, panel, *dashed, color=color, ls="--", ms=6, marker="x" if single else "", paper="d")


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
        axes.errorbar(
            list(known), estimates, yerr=reach, fmt=marker_of(number), ms=4, lw=1.2, color=color, label=panel.model
        )
        paper = {place + offset: panel.paper[name] for place, name in enumerate(labels) if name in panel.paper}
        axes.plot(list(paper), list(paper.values()), "D", ms=6, mfc="none", mec=color, mew=1.0, zorder=1)
    axes.set_xticks(range(len(labels)), list(labels.values()))


@dataclass(frozen=True)
class EffectsByModel:
    """The axes of a probe in the section's figure: effects side by side, models beside each other.

    Effects that no model has take no room.

    Args:
        effects: label on the axis, by the effect's name.
        title: the finding, in a few words.
        ylabel: of the axes.
        levels: heights of dashed reference lines.
        limits: intervals are drawn no further than this.
        ylim: ends of the axis, where they are fixed.
        label_size: of the labels on the axis, in points.
        slanted: whether the labels are slanted, for many or long ones.
    """

    effects: Mapping[str, str]
    title: str
    ylabel: str = "recovery"
    levels: tuple[float, ...] = (0.0, 1.0)
    limits: tuple[float, float] = (-0.5, 1.5)
    ylim: tuple[float, float] | None = None
    label_size: float | None = None
    slanted: bool = False

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw all models into one axes."""
        levels(axes, *self.levels)
        known = {name: label for name, label in self.effects.items() if any(name in panel.effects for panel in panels)}
        labels = known or self.effects
        draw_by_model(axes, panels, labels, self.limits)
        if self.slanted:
            axes.set_xticks(range(len(labels)), list(labels.values()), rotation=40, ha="right", rotation_mode="anchor")
            axes.set_xlim(-0.6, len(labels) - 0.4)
        if self.ylim:
            axes.set_ylim(*self.ylim)
        if self.label_size:
            axes.tick_params(axis="x", labelsize=self.label_size)
        axes.set_ylabel(self.ylabel)
        axes.set_title(self.title)


@dataclass(frozen=True)
class DosesByModel:
    """The axes of a probe in the section's figure: two dose curves of each model.

    Args:
        solid: condition and metric of the drawn-through curve.
        dashed: of the dashed curve.
        title: the finding, in a few words.
        xlabel: of the axes.
        ylabel: of the axes.
        log: whether the sizes stand on a logarithmic axis, each with its tick.
        levels: heights of dashed reference lines.
        ylim: ends of the vertical axis, where they are fixed.
    """

    solid: tuple[str, str]
    dashed: tuple[str, str]
    title: str
    xlabel: str = "patched positions"
    ylabel: str = "recovery"
    log: bool = True
    levels: tuple[float, ...] = (0.0, 1.0)
    ylim: tuple[float | None, float | None] | None = None

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw all models into one axes."""
        levels(axes, *self.levels)
        draw_doses_by_model(axes, panels, self.solid, self.dashed)
        sizes = sorted({size for panel in panels for size in panel.curve(*self.solid)})
        if self.log and sizes:
            dose_axis(axes, sizes, self.xlabel)
        else:
            axes.set_xlabel(self.xlabel)
        if self.ylim:
            axes.set_ylim(*self.ylim)
        axes.set_ylabel(self.ylabel)
        axes.set_title(self.title)
