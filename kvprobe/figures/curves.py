"""Curves of several conditions over one parameter, at evenly spaced places and on an axis with ends of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvprobe.figures.by_model import model_color, model_marker
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS, PAPER_MARKER, levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POSITIVE = 1e-9
"""Smallest value on a logarithmic axis whose ends follow the estimates."""


@dataclass(frozen=True)
class Curve:
    """One metric of one condition, such as `splice_{length}`, and its look.

    Its label, which may name parameters of the condition, stands in the key; without one it has no line there. One that
    is not `shaded` has no intervals.
    """

    condition: str
    metric: str
    label: str = ""
    color: str = COLORS["ink"]
    marker: str = "o"
    ls: str = "-"
    shaded: bool = True


@dataclass(frozen=True)
class Scale:
    """The vertical axis of curves.

    Args:
        limits: values beyond are drawn at the limit; `None` for a logarithmic axis whose ends follow the estimates.
        log: whether the axis is logarithmic; limits are then its ends.
        ylim: ends of a linear axis, where they are fixed.
        room: between the highest estimate and the end of an axis that follows them, as a factor.
        complement: whether 1 less the value is drawn.
    """

    limits: tuple[float, float] | None = (-0.5, 1.5)
    log: bool = False
    ylim: tuple[float, float] | None = None
    room: float = 5.0
    complement: bool = False

    def drawn(self, values: ArrayLike) -> NDArray[np.float64]:
        """[..., end] values as they are drawn, in rising order along the last axis."""
        shown = 1 - np.asarray(values) if self.complement else np.asarray(values)
        return np.clip(np.sort(shown, axis=-1), *(self.limits or (_POSITIVE, None)))

    def fit(self, axes: Axes, estimates: Sequence[float]) -> None:
        """Set the ends of the axis, which other models may share."""
        if self.ylim:
            axes.set_ylim(*self.ylim)
        if self.log and estimates:
            low, high = self.limits or (max(min(estimates) / 5, _POSITIVE), max(estimates) * self.room)
            if axes.get_yscale() == "log":
                low, high = min(low, axes.get_ylim()[0]), max(high, axes.get_ylim()[1])
            axes.set_yscale("log")
            axes.set_ylim(low, high)


@dataclass(frozen=True)
class Curves:
    """A row of a figure: curves over one parameter of their conditions, each with its intervals.

    Args:
        curves: of every axes.
        over: the parameter.
        ylabel: of the leftmost axes.
        xlabel: of every axes.
        height: of the row, in inches.
        scale: of the vertical axis.
        levels: heights of dashed reference lines.
        apart: how far curves are drawn beside each other where they would lie on one another, sizes being 1 apart;
            their intervals are then lines.
    """

    curves: tuple[Curve, ...]
    over: str
    ylabel: str
    xlabel: str
    height: float
    scale: Scale = Scale()
    levels: tuple[float, ...] = ()
    apart: float = 0.0

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the curves of one model."""
        levels(axes, *self.levels)
        sizes = _sizes([panel], self.curves, self.over)
        draw_curves(axes, panel, self.curves, self.over, sizes=sizes, scale=self.scale, apart=self.apart)
        _size_axis(axes, sizes, self.xlabel, 0.4 if self.apart else None)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """Legend handles: labelled curves, the interval and, where there are any, the paper's values."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list[Any] = []
        for curve in (curve for curve in self.curves if curve.label):
            known = [effect for panel in panels for effect in panel.select(curve.condition, curve.metric)]
            if known:
                look: dict[str, Any] = {"color": curve.color, "marker": curve.marker, "ls": curve.ls}
                handles.append(Line2D([], [], ms=4, lw=1.4, label=curve.label.format(**known[0].parameters), **look))
        if not handles:
            return []
        handles.append(Patch(color=COLORS["ink"], alpha=0.2, lw=0, label="interval"))
        paper = any(panel.paper for panel in panels)
        return [*handles, Line2D([], [], label="the paper's value", **PAPER_MARKER)] if paper else handles


@dataclass(frozen=True)
class CurvesByModel:
    """The axes of a probe in the section's figure: two curves of each model over one parameter.

    Args:
        solid: condition and metric of the drawn-through curve.
        dashed: of the dashed curve.
        over: the parameter.
        title: the finding, in a few words.
        ylabel: of the axes.
        xlabel: of the axes.
        scale: of the vertical axis.
        levels: heights of dashed reference lines.
    """

    solid: tuple[str, str]
    dashed: tuple[str, str]
    over: str
    title: str
    ylabel: str
    xlabel: str
    scale: Scale = Scale()
    levels: tuple[float, ...] = ()

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw all models into one axes."""
        levels(axes, *self.levels)
        curves = Curve(*self.solid), Curve(*self.dashed, marker="", ls="--")
        sizes = _sizes(panels, curves, self.over)
        for panel in panels:
            color = model_color(panels, panel)
            marker = model_marker(panels, panel)
            own = replace(curves[0], color=color, label=panel.model, marker=marker), replace(curves[1], color=color)
            draw_curves(axes, panel, own, self.over, sizes=sizes, scale=self.scale)
        _size_axis(axes, sizes, self.xlabel)
        axes.set_ylabel(self.ylabel)
        axes.set_title(self.title)


def draw_curves(
    axes: Axes,
    panel: Panel,
    curves: Sequence[Curve],
    over: str,
    *,
    sizes: Sequence[float],
    scale: Scale,
    apart: float = 0.0,
) -> None:
    """Curves of one model with their intervals, and the paper's values as diamonds, at the places of `sizes`."""
    estimates: list[float] = []
    for number, curve in enumerate(curves):
        effects = panel.curve(curve.condition, curve.metric, over)
        if not effects:
            continue
        shift = apart * (number - (len(curves) - 1) / 2)
        places = [sizes.index(size) + shift for size in effects]
        low, middle, high = scale.drawn([[effect.low, effect.estimate, effect.high] for effect in effects.values()]).T
        if curve.shaded and apart:
            axes.vlines(places, low, high, color=curve.color, lw=2.5, alpha=0.3, zorder=2)
        elif curve.shaded:
            axes.fill_between(places, low, high, color=curve.color, alpha=0.15, lw=0, zorder=2)
        line: dict[str, Any] = {"color": curve.color, "marker": curve.marker, "ls": curve.ls, "label": curve.label}
        axes.plot(places, middle, ms=4, lw=1.4, zorder=3, clip_on=False, **line)
        for place, effect in zip(places, effects.values(), strict=True):
            if effect.name in panel.paper:
                value = scale.drawn([panel.paper[effect.name]])
                axes.plot(place, value, zorder=5, clip_on=False, **PAPER_MARKER | {"mec": curve.color})
        estimates += middle.tolist()
    scale.fit(axes, estimates)


def _sizes(panels: Iterable[Panel], curves: Sequence[Curve], over: str) -> list[float]:
    """The values that the parameter has in any effect of the curves' conditions, whatever its metric, in order."""
    conditions = {curve.condition for curve in curves}
    effects = [effect for panel in panels for effect in panel.effects.values() if effect.condition in conditions]
    return sorted({float(effect.parameters[over]) for effect in effects})


def _size_axis(axes: Axes, sizes: Sequence[float], label: str, margin: float | None = None) -> None:
    """One place for each size, since sizes often begin with 0 and grow by powers; 1,024 is written 1k."""
    last = len(sizes) - 1
    margin = 0.05 * max(1, last) if margin is None else margin
    axes.set_xlim(-margin, last + margin)
    labels = [f"{size / 1024:g}k" if size >= 1024 and size % 1024 == 0 else f"{size:g}" for size in sizes]
    axes.set_xticks(range(len(sizes)), labels)
    axes.set_xlabel(label)
