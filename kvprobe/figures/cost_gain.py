"""What something costs against what it gains: a point for each arm, and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.by_model import model_color
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS, levels
from kvprobe.stats import Effect

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MarkedLook = tuple[str, str, str]
"""Label in the key, colour and marker."""
Point = tuple[Effect, Effect]
"""Cost and gain of one arm."""
_FRONT: dict[str, Any] = {"lw": 1.0, "ls": (0, (5, 2))}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6.5, "mfc": "none"}


@dataclass(frozen=True)
class CostGain:
    """A row of a figure: the gain of each arm, with its interval, over its cost.

    Args:
        arms: by condition, the label in the key, the colour and the marker.
        cost: metric across.
        gain: metric upwards.
        xlabel: of every axes.
        ylabel: of the leftmost axes.
        height: of the row, in inches.
        ylim: ends of the vertical axis.
        bounds: conditions that the front leaves out.
        numbered: the condition whose number is written beside its points.
        front: whether the Pareto front is drawn.
        line: condition whose points are joined by a line in place of markers, by its parameter; its label and colour.
        levels: heights of dashed reference lines.
        xlim: ends of the horizontal axis, `None` for one that the data choose; by default a whole prefill.
    """

    arms: Mapping[str, MarkedLook]
    cost: str
    gain: str
    xlabel: str
    ylabel: str
    height: float
    ylim: tuple[float, float]
    bounds: tuple[str, ...] = ()
    numbered: str | None = None
    front: bool = True
    line: tuple[str, str, str] | None = None
    levels: tuple[float, ...] = (0.0, 1.0)
    xlim: tuple[float | None, float | None] | None = None

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the arms of one model."""
        levels(axes, *self.levels)
        if self.front:
            self.draw_front(axes, panel, COLORS["ink"])
        if self.line:
            condition, _, color = self.line
            across, up = (panel.curve(condition, metric).values() for metric in (self.cost, self.gain))
            axes.plot([cost.estimate for cost in across], [gain.estimate for gain in up], lw=1, color=color)
        for condition, (_, color, marker) in self.arms.items():
            for cost, gain in self.points(panel, condition):
                self.draw_point(axes, panel, (cost, gain), color, marker)
                if condition == self.numbered:
                    (number,) = cost.parameters.values()
                    place = (cost.estimate, gain.estimate)
                    shown: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "color": color, "zorder": 5}
                    axes.annotate(str(number), place, (5, 3), **shown)
        self.limit(axes)
        axes.set_xlabel(self.xlabel)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """Legend handles: the arms that a model has, intervals, the front, the paper's values where there are any."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        ink = COLORS["ink"]
        handles: list[Any] = [
            Line2D([], [], ls="", marker=marker, color=color, ms=_size(marker), label=label)
            for condition, (label, color, marker) in self.arms.items()
            if any(panel.select(condition, self.cost) for panel in panels)
        ]
        if self.line:
            handles.append(Line2D([], [], lw=1, color=self.line[2], label=self.line[1]))
        handles.append(Patch(color=ink, alpha=0.3, lw=0, label="interval"))
        if self.front:
            handles.append(Line2D([], [], color=ink, label="Pareto front", **_FRONT))
        if any(_in_paper(panel, point) for panel in panels for name in self.arms for point in self.points(panel, name)):
            handles.append(Line2D([], [], mec=ink, label="the paper's value", **_PAPER))
        return handles

    def points(self, panel: Panel, condition: str) -> Iterator[Point]:
        """Cost and gain of the arms of a condition."""
        for cost in panel.select(condition, self.cost):
            for gain in panel.select(condition, self.gain, **cost.parameters):
                yield cost, gain

    def draw_front(self, axes: Axes, panel: Panel, color: str) -> None:
        """The steps of what no other arm beats."""
        inside = [condition for condition in self.arms if condition not in self.bounds]
        points = [
            (cost.estimate, gain.estimate) for condition in inside for cost, gain in self.points(panel, condition)
        ]
        if front := pareto_front(points):
            across, up = zip(*front, strict=True)
            axes.step([*across, 1.05], [*up, up[-1]], where="post", color=color, zorder=1, **_FRONT)

    def limit(self, axes: Axes) -> None:
        """The ends of the axes, and the quarters of a full prefill where the whole of it is shown."""
        axes.set_ylim(*self.ylim)
        if self.xlim:
            axes.set_xlim(*self.xlim)
        else:
            axes.set_xlim(-0.03, 1.06)
            axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])

    def draw_point(self, axes: Axes, panel: Panel, point: Point, color: str, marker: str) -> None:
        """One arm with its interval, and the paper's value where there is one."""
        across, up = point
        low, high = np.clip([up.low, up.high], -0.5, 1.5)
        axes.plot([across.estimate] * 2, [low, high], color=color, lw=3, alpha=0.3, solid_capstyle="butt", zorder=2)
        axes.plot(across.estimate, up.estimate, marker, color=color, ms=_size(marker), zorder=4, clip_on=False)
        if _in_paper(panel, point):
            theirs = panel.paper[across.name], panel.paper[up.name]
            axes.plot(*theirs, mec=color, mew=1.2, zorder=3, clip_on=False, **_PAPER)


@dataclass(frozen=True)
class CostGainByModel:
    """The axes of a probe in the section's figure: the arms and the front of every model, a marker for each arm.

    Args:
        part: the row of the probe's figure that is shown.
        title: the finding, in a few words.
        xlabel: of the axes.
        ylabel: of the axes.
        arms: those shown, by condition; by default all but the bounds.
        key_place: where the key of the markers stands.
    """

    part: CostGain
    title: str
    xlabel: str
    ylabel: str
    arms: tuple[str, ...] = ()
    key_place: str = "center right"

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw all models into one axes."""
        from matplotlib.lines import Line2D

        shown = self.arms or tuple(name for name in self.part.arms if name not in self.part.bounds)
        for panel in (panel for panel in panels if panel.effects):
            color = model_color(panels, panel)
            points = [(name, point) for name in shown for point in self.part.points(panel, name)]
            if self.part.front:
                self.part.draw_front(axes, panel, color)
            else:
                across, up = ([point[i].estimate for _, point in points] for i in (0, 1))
                axes.plot(across, up, color=color, lw=0.8, alpha=0.6)
            for name, (cost, gain) in points:
                marker = self.part.arms[name][2]
                if self.part.front:
                    axes.plot(cost.estimate, gain.estimate, marker, color=color, ms=4, alpha=0.85, clip_on=False)
                else:
                    self.part.draw_point(axes, panel, (cost, gain), color, marker)
            axes.plot([], [], "-", color=color, label=panel.model)
        marks = [
            Line2D([], [], ls="", marker=marker, color=COLORS["grey"], ms=4, label=label)
            for label, _, marker in (self.part.arms[name] for name in shown)
        ]
        small = {"fontsize": 6, "frameon": False, "handletextpad": 0.2, "labelspacing": 0.25}
        axes.legend(handles=marks, loc=self.key_place, **small)
        self.part.limit(axes)
        axes.set_xlabel(self.xlabel)
        axes.set_ylabel(self.ylabel)
        axes.set_title(self.title)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those `(cost, gain)` that none beats: none is as cheap and better, or as good and cheaper; cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def _in_paper(panel: Panel, point: Point) -> bool:
    return all(effect.name in panel.paper for effect in point)


def _size(marker: str) -> float:
    """In points; a star looks smaller than it is."""
    return 8.5 if marker == "*" else 6.0
