"""Effects over a parameter of their condition: how many positions were patched, which share of the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.bars import Look
from kvprobe.figures.panel import Panel
from kvprobe.figures.spec import Key
from kvprobe.figures.style import COLORS, levels
from kvprobe.stats import Effect
from kvprobe.stats.labels import Scalar

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Curve:
    """Effects of one condition that differ in one parameter.

    Args:
        condition: with the parameter and the fixed ones.
        fixed: names and values of its other parameters.
        also: sizes and names of effects on the curve whose own condition names no size: no dose, everything.
        metric: where it is not that of the other curves.
        line: its style, as matplotlib names it.
    """

    condition: str
    fixed: tuple[tuple[str, Scalar], ...] = ()
    also: tuple[tuple[float, str], ...] = ()
    metric: str | None = None
    line: str = "-"

    def points(self, panel: Panel, metric: str) -> dict[float, Effect]:
        """The effects of one model by size, in rising order."""
        also = {size: panel.effects[name] for size, name in self.also if name in panel.effects}
        fixed: dict[str, Any] = dict(self.fixed)
        return dict(sorted({**panel.curve(self.condition, self.metric or metric, **fixed), **also}.items()))


@dataclass(frozen=True)
class Doses:
    """A row of a figure: curves of one metric over a parameter of their condition.

    Args:
        curves: by condition (`suffix_{percent}`) or curve, the label in the key and the colour.
        ylabel: of the leftmost axes.
        height: of the row, in inches.
        xlabel: of every axes.
        metric: of all curves.
        marker: of all curves.
        ceilings: names of effects drawn as level lines, each with its label, its colour and its style.
        ticks_of: the condition whose sizes a logarithmic axis has as ticks; `None` for a linear axis.
        whole_ticks_of: the condition whose sizes, about six of them, a linear axis has as ticks: for layers.
        levels: heights of dashed reference lines.
        ylim: ends of the vertical axis; `None` for an end that the data choose.
        apart: how far neighbouring curves are set apart, as a share of the smallest step between sizes, so that curves
            with equal values can be seen; their intervals are bars then.
    """

    curves: Mapping[str | Curve, Look] | Mapping[str, Look] | Mapping[Curve, Look]
    ylabel: str
    height: float
    xlabel: str = "patched positions"
    metric: str = "recovery"
    marker: str = "o"
    ceilings: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    ticks_of: str | None = None
    whole_ticks_of: str | None = None
    levels: tuple[float, ...] = (0.0, 1.0)
    ylim: tuple[float | None, float | None] | None = None
    apart: float | None = None

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the curves of one model."""
        levels(axes, *self.levels)
        for (curve, (label, color)), shift in zip(self.curves.items(), self._shifts(panel), strict=True):
            look = {"color": color, "label": label, "marker": self.marker, "ls": _line(curve)}
            draw_dose(axes, panel, curve, self.metric, shift=shift, **look)
        for name, (_, color, style) in self.ceilings.items():
            if name in panel.effects:
                axes.axhline(panel.effects[name].estimate, color=color, ls=style, lw=1.3, zorder=2)
        if self.ticks_of:
            dose_axis(axes, list(panel.curve(self.ticks_of, self.metric)), self.xlabel)
        else:
            axes.set_xlabel(self.xlabel)
        if self.whole_ticks_of:
            numbers = [int(size) for size in panel.curve(self.whole_ticks_of, self.metric)]
            axes.set_xticks(numbers[:: max(1, len(numbers) // 6)])

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """Legend handles."""
        from matplotlib.lines import Line2D

        key = dose_key(dict(self.curves.values()), marker=self.marker, paper=any(panel.paper for panel in panels))
        for handle, curve in zip(key, self.curves, strict=False):
            handle.set_linestyle(_line(curve))
        return key + [
            Line2D([], [], color=color, ls=style, lw=1.3, label=label) for label, color, style in self.ceilings.values()
        ]

    def sizes(self, panel: Panel) -> list[float]:
        """Those of all curves of one model, in rising order."""
        return sorted({size for curve in self.curves for size in _points(panel, curve, self.metric)})

    def _shifts(self, panel: Panel) -> list[float | None]:
        """By how much each curve is moved along the axis; `None` where curves are not set apart."""
        if self.apart is None:
            return [None] * len(self.curves)
        step = self.apart * min(np.diff(self.sizes(panel)), default=1.0)
        return [step * (number - (len(self.curves) - 1) / 2) for number in range(len(self.curves))]


def draw_dose(
    axes: Axes,
    panel: Panel,
    curve: str | Curve,
    metric: str,
    *,
    color: str,
    label: str | None = None,
    shift: float | None = None,
    paper: str = "D",
    **line: Any,
) -> None:
    """The effects of one condition over its parameter, with their intervals, and the paper's values as diamonds.

    Args:
        axes: to draw on.
        panel: the model.
        curve: or its condition, where that has one parameter: `suffix_{percent}`.
        metric: such as `recovery`.
        color: of the curve.
        label: in the key.
        shift: by how much the curve is moved along the axis, its intervals drawn as bars; `None` for a band.
        paper: marker of the paper's values.
        line: for matplotlib's `plot`.
    """
    points = _points(panel, curve, metric)
    if not points:
        return
    sizes, effects = [size + (shift or 0.0) for size in points], list(points.values())
    # An unbounded end must not stretch the axis.
    low = np.clip([effect.low for effect in effects], -0.5, 1.5)
    high = np.clip([effect.high for effect in effects], -0.5, 1.5)
    if shift is None:
        axes.fill_between(sizes, low, high, color=color, alpha=0.18, lw=0, zorder=2)
    else:
        axes.vlines(sizes, low, high, color=color, alpha=0.3, lw=2.5, zorder=2)
    style: dict[str, Any] = {"marker": "o", "ms": 3.5, "lw": 1.5, "zorder": 3} | line
    axes.plot(sizes, [effect.estimate for effect in effects], color=color, label=label, **style)
    known = {
        size: panel.paper[effect.name]
        for size, effect in zip(sizes, effects, strict=True)
        if effect.name in panel.paper
    }
    if known:
        axes.plot(list(known), list(known.values()), paper, ms=5, mfc="white", mec=color, mew=1.2, zorder=4)


def dose_axis(axes: Axes, sizes: Sequence[float], label: str = "patched positions") -> None:
    """A logarithmic axis of sizes with the sizes themselves as ticks."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [f"{size:g}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def doses_key(*parts: Doses) -> Key:
    """The key of several rows: a line for each curve that some model has, then interval and the paper's value."""

    def key(panels: Sequence[Panel]) -> list[Any]:
        lines = []
        for part in parts:
            known = {
                label: color
                for curve, (label, color) in part.curves.items()
                if any(_points(panel, curve, part.metric) for panel in panels)
            }
            lines += dose_lines(known, part.marker)
        return [*lines, *dose_key({}, paper=any(panel.paper for panel in panels))]

    return key


def dose_lines(curves: Mapping[str, str], marker: str = "o") -> list[Any]:
    """Legend handles: a line for each label and colour."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], marker=marker, ms=3.5, lw=1.5, color=color, label=label) for label, color in curves.items()]


def dose_key(curves: Mapping[str, str], *, paper: bool, marker: str = "o") -> list[Any]:
    """Legend handles: a line for each label and colour, the interval and, where there are any, the paper's values."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [*dose_lines(curves, marker), Patch(color=COLORS["ink"], alpha=0.18, lw=0, label="interval")]
    if paper:
        handles.append(
            Line2D([], [], marker="D", ls="", ms=5, mfc="white", mec=COLORS["ink"], mew=1.2, label="the paper's value")
        )
    return handles


def _points(panel: Panel, curve: str | Curve, metric: str) -> dict[float, Effect]:
    return (Curve(curve) if isinstance(curve, str) else curve).points(panel, metric)


def _line(curve: str | Curve) -> str:
    return "-" if isinstance(curve, str) else curve.line
