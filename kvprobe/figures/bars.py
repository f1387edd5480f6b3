"""Effects side by side, each with its interval, its clusters as dots and the paper's value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS, PAPER_MARKER, levels
from kvprobe.stats import Effect

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Look = tuple[str, str]
"""Label on the axis or in the key, and colour."""
Dots = Callable[[Panel, Effect], pd.Series]
"""A value for each cluster of an effect."""
# Half the width of an effect on its axis, where effects stand 1 apart.
_HALF = 0.27


def recovery_dots(panel: Panel, effect: Effect) -> pd.Series:
    """Each skeleton's recovery, from the rows that the effect was made of."""
    return recovery_by_skeleton(panel.rows_of(effect))


def shares_by_skeleton(columns: Mapping[str, str]) -> Dots:
    """Each skeleton's share of rows in which a column is true; `columns` names it by the effect's metric."""

    def dots(panel: Panel, effect: Effect) -> pd.Series:
        rows = panel.rows_of(effect)
        return rows[columns[effect.metric]].astype(float).groupby(rows["skeleton"]).mean()

    return dots


@dataclass(frozen=True)
class Bars:
    """A row of a figure: effects side by side.

    Args:
        effects: by name, with the label on the axis and the colour.
        ylabel: of the leftmost axes.
        height: of the row, in inches.
        levels: heights of dashed reference lines.
        label_size: of the labels on the axis, in points.
        label_rotation: of the labels on the axis, in degrees.
        ylim: ends of the axis, where they are fixed.
        dots: what the dots of an effect are; `None` for no dots.
        dot: what one dot is.
        xlabel: of every axes.
    """

    effects: Mapping[str, Look]
    ylabel: str
    height: float
    levels: tuple[float, ...] = (0.0, 1.0)
    label_size: float | None = None
    label_rotation: float = 0.0
    ylim: tuple[float | None, float | None] | None = None
    dots: Dots | None = recovery_dots
    dot: str = "one skeleton"
    xlabel: str | None = None

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the effects of one model."""
        levels(axes, *self.levels)
        known = [panel.effects[name] for name in self.effects if name in panel.effects]
        dots = {effect.name: self.dots(panel, effect) for effect in known} if self.dots else {}
        draw_effects(axes, panel, self.effects, dots)
        if self.label_size:
            axes.tick_params(axis="x", labelsize=self.label_size)
        if self.label_rotation:
            axes.tick_params(axis="x", labelrotation=self.label_rotation)
        if self.xlabel:
            axes.set_xlabel(self.xlabel)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """Legend handles."""
        return effect_key(self.dot if self.dots else None, paper=any(panel.paper for panel in panels))


def draw_effects(axes: Axes, panel: Panel, names: Mapping[str, tuple[str, str]], dots: Mapping[str, pd.Series]) -> None:
    """Effects side by side, each with its interval, its clusters as dots and the paper's value.

    Args:
        axes: to draw on.
        panel: the model.
        names: of the effects, with the label on the axis and the colour.
        dots: by effect, a value for each cluster.
    """
    for place, (name, (_, color)) in enumerate(names.items()):
        if name in dots:
            spread = np.linspace(-_HALF, _HALF, len(dots[name])) if len(dots[name]) > 1 else np.zeros(1)
            order = np.random.Generator(np.random.PCG64(0)).permutation(len(spread))
            axes.plot(place + spread[order], dots[name], "o", ms=3, mew=0, color=color, alpha=0.4, zorder=2)
        if name in panel.effects:
            _draw_interval(axes, place, panel.effects[name], color)
        if name in panel.paper:
            axes.plot(place + 0.38, panel.paper[name], zorder=5, clip_on=False, **PAPER_MARKER)
    axes.set_xlim(-0.55, len(names) - 0.45)
    axes.set_xticks(range(len(names)), [label for label, _ in names.values()])
    axes.tick_params(axis="x", length=0)


def recovery_by_skeleton(rows: pd.DataFrame, shift: pd.Series | None = None) -> pd.Series:
    """Each skeleton's recovery as ratio of sums; see `recovery_by`."""
    return recovery_by(rows, "skeleton", shift=shift)


def recovery_by(rows: pd.DataFrame, *columns: str, shift: pd.Series | None = None) -> pd.Series:
    """Recovery as ratio of sums, by the values of columns, which become the index.

    Args:
        rows: with `margin`, `m_base` and `m_donor` (logits).
        columns: that the rows are grouped by.
        shift: [row] in logits, where it is not margin - m_base.
    """
    moved = rows["margin"] - rows["m_base"] if shift is None else shift
    sums = rows.assign(shift=moved, gap=rows["m_donor"] - rows["m_base"])
    totals = sums.groupby(list(columns))[["shift", "gap"]].sum()
    return totals["shift"] / totals["gap"]


def effect_key(dots: str | None, *, paper: bool = True) -> list[Any]:
    """Legend handles of `draw_effects`.

    Args:
        dots: what a dot is; `None` where there are none.
        paper: whether there are values of the paper.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], lw=1.6, color=COLORS["ink"], label="estimate"),
        Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="its interval"),
    ]
    if dots is not None:
        handles.append(Line2D([], [], marker="o", ls="", ms=4, mew=0, color=COLORS["ink"], alpha=0.35, label=dots))
    if paper:
        handles.append(Line2D([], [], label="the paper's value", **PAPER_MARKER))
    return handles


def _draw_interval(axes: Axes, place: float, effect: Effect, color: str) -> None:
    from matplotlib.patches import Rectangle

    # An unbounded end must leave the picture and not stretch its axis, so the axis learns of finite ends only.
    low, high = max(effect.low, -1e6), min(effect.high, 1e6)
    axes.add_artist(Rectangle((place - _HALF, low), 2 * _HALF, high - low, color=color, alpha=0.35, lw=0, zorder=3))
    axes.update_datalim([(place, end) for end in (effect.low, effect.high) if np.isfinite(end)] or [(place, 0.0)])
    ends = [place - _HALF, place + _HALF]
    axes.plot(ends, [effect.estimate] * 2, color=color, lw=1.6, zorder=4, solid_capstyle="butt")
