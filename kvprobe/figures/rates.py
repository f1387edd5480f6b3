"""Shares as dots with intervals on horizontal lines, one line for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mec": COLORS["ink"], "mew": 1.2}
_DASHED: dict[str, Any] = {"color": COLORS["ink"], "lw": 0.9, "ls": (0, (4, 3))}


@dataclass(frozen=True)
class Series:
    """One kind of dot: `effect` is the effect's name with `{arm}` in it."""

    effect: str
    label: str
    color: str
    marker: str = "o"
    filled: bool = True

    def of(self, arm: str) -> str:
        """The name of the effect that an arm has."""
        return self.effect.format(arm=arm)


@dataclass(frozen=True)
class Rates:
    """A row of a figure: a horizontal line for each arm, the first on top, with a dot for each series.

    Series without any effect take no room.

    Args:
        arms: label of each line, by the word put into the series' effect names.
        series: drawn beside each other within a line.
        xlabel: of every axes; the number of decisions is put below it.
        height: of the row, in inches.
        ylabel: of the leftmost axes.
        baseline: name of an effect drawn as a dashed vertical line, and its label in the key.
        levels: places of further dashed vertical lines.
        xlim: ends of the axis; `None` for an end that the data choose.
        log: whether the axis is logarithmic; what lies below the end of its `xlim` is drawn there.
        breaks: numbers of the lines that a new group of arms begins with.
        shaded: arms on grey ground, such as floors.
        colors: of arms that have their own; the others have that of the series.
    """

    arms: Mapping[str, str]
    series: tuple[Series, ...]
    xlabel: str
    height: float
    ylabel: str = ""
    baseline: tuple[str, str] | None = None
    levels: tuple[float, ...] = ()
    xlim: tuple[float | None, float | None] = (-0.04, 1.04)
    log: bool = False
    breaks: tuple[int, ...] = ()
    shaded: tuple[str, ...] = ()
    colors: Mapping[str, str] = field(default_factory=dict)

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the arms of one model."""
        if self.log:
            axes.set_xscale("log")
        shown = _from(panel, self.xlim[0]) if self.log and self.xlim[0] is not None else panel
        known = self._known([panel])
        draw_rates(axes, shown, list(self.arms), known, self.xlabel, xlim=self.xlim, colors=self.colors)
        for place in (place for place, arm in enumerate(self.arms) if arm in self.shaded):
            axes.axhspan(place - 0.5, place + 0.5, color=COLORS["grey"], alpha=0.1, lw=0, zorder=0)
        if self.baseline and self.baseline[0] in panel.effects:
            axes.axvline(panel.effects[self.baseline[0]].estimate, zorder=1, **_DASHED)
        for level in self.levels:
            axes.axvline(level, zorder=1, **_DASHED)
        for first in self.breaks:
            axes.axhline(first - 0.5, color=COLORS["grey"], lw=0.9, zorder=0)
        # Columns share their axis, so naming the lines in one names them for all.
        axes.set_yticks(range(len(self.arms)), list(self.arms.values()))

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """Legend handles: series, interval, the paper's value where there is one, the baseline."""
        from matplotlib.lines import Line2D

        handles = rate_key(self._known(panels), paper=any(panel.paper for panel in panels))
        if self.baseline and any(self.baseline[0] in panel.effects for panel in panels):
            handles.append(Line2D([], [], label=self.baseline[1], **_DASHED))
        return handles

    def _known(self, panels: Sequence[Panel]) -> list[Series]:
        """The series that have an effect in one of the panels."""
        return [
            kind for kind in self.series if any(kind.of(arm) in panel.effects for panel in panels for arm in self.arms)
        ]


@dataclass(frozen=True)
class RatesByModel(EffectsByModel):
    """The axes of a probe in the section's figure: shares side by side, models beside each other."""

    levels: tuple[float, ...] = ()
    limits: tuple[float, float] = (0.0, 1.0)
    ylim: tuple[float, float] | None = (-0.05, 1.05)
    label_size: float | None = 7
    slanted: bool = True


def draw_rates(
    axes: Axes,
    panel: Panel,
    arms: Sequence[str],
    series: Sequence[Series],
    label: str,
    *,
    xlim: tuple[float | None, float | None] = (-0.04, 1.04),
    colors: Mapping[str, str] | None = None,
) -> None:
    """Dots of all series on one line for each arm, the first arm on top, and the paper's values as diamonds.

    Args:
        axes: to draw on.
        panel: the model.
        arms: put into the series' effect names.
        series: drawn beside each other within a line.
        label: of the horizontal axis; the number of decisions is put below it.
        xlim: ends of the axis; `None` for an end that the data choose.
        colors: of arms that have their own.
    """
    step = 0.66 / max(1, len(series))
    for number, kind in enumerate(series):
        for place, arm in enumerate(arms):
            name, y = kind.of(arm), place + step * (number - (len(series) - 1) / 2)
            if name not in panel.effects:
                continue
            effect, color = panel.effects[name], (colors or {}).get(arm, kind.color)
            # An unbounded end must leave the picture.
            ends = [max(effect.low, -1e6), min(effect.high, 1e6)]
            axes.plot(ends, [y, y], color=color, lw=2.6, alpha=0.4, solid_capstyle="butt", zorder=2)
            face = color if kind.filled else "white"
            axes.plot(effect.estimate, y, kind.marker, color=color, mfc=face, ms=4.8, zorder=4, clip_on=False)
            if name in panel.paper:
                # What lies outside is shown at the edge.
                shown = np.clip(panel.paper[name], -np.inf if xlim[0] is None else xlim[0], xlim[1])
                axes.plot(shown, y, zorder=3, clip_on=False, **_PAPER)
    axes.set_xlim(*xlim)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel(f"{label}\n{count_of(panel, arms, series)}")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelsize=8)
    for edge in range(len(arms) - 1):
        axes.axhline(edge + 0.5, color="#E8E8E8", lw=0.7, zorder=0)


def _from(panel: Panel, least: float) -> Panel:
    """The panel with what is smaller than `least`, such as the rounding of equal caches, put there."""
    ends = ("estimate", "low", "high")
    shown = {
        name: replace(effect, **{end: max(getattr(effect, end), least) for end in ends})
        for name, effect in panel.effects.items()
    }
    return replace(panel, effects=shown)


def count_of(panel: Panel, arms: Sequence[str], series: Sequence[Series]) -> str:
    """`n = 60` for the dots of `draw_rates`, or a range where dots differ."""
    names = [kind.of(arm) for kind in series for arm in arms]
    counts = sorted({panel.effects[name].n for name in names if name in panel.effects})
    return f"n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "") if counts else ""


def rate_key(series: Sequence[Series], *, paper: bool) -> list[Any]:
    """Legend handles of `draw_rates`."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D(
            [],
            [],
            marker=kind.marker,
            ls="",
            ms=4.8,
            color=kind.color,
            mfc=kind.color if kind.filled else "white",
            label=kind.label,
        )
        for kind in series
    ]
    handles.append(Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="interval"))
    return [*handles, Line2D([], [], label="the paper's value", **_PAPER)] if paper else handles
