"""Shares of decisions as dots with intervals, one line of the axes for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mec": COLORS["ink"], "mew": 1.2}


@dataclass(frozen=True)
class Series:
    """One kind of dot: `effect` is the effect's name with `{arm}` in it."""

    effect: str
    label: str
    color: str
    marker: str = "o"
    filled: bool = True


def draw_rates(axes: Axes, panel: Panel, arms: Sequence[str], series: Sequence[Series], label: str) -> None:
    """Dots of all series on one line for each arm, the first arm on top, and the paper's values as diamonds.

    Args:
        axes: to draw on.
        panel: the model.
        arms: put into the series' effect names.
        series: drawn beside each other within a line.
        label: of the horizontal axis; the number of decisions is put behind it.
    """
    step = 0.66 / max(1, len(series))
    for number, kind in enumerate(series):
        for place, arm in enumerate(arms):
            name, y = kind.effect.format(arm=arm), place + step * (number - (len(series) - 1) / 2)
            if name not in panel.effects:
                continue
            effect = panel.effects[name]
            ends = [effect.low, effect.high]
            axes.plot(ends, [y, y], color=kind.color, lw=2.6, alpha=0.4, solid_capstyle="butt", zorder=2)
            face = kind.color if kind.filled else "white"
            axes.plot(effect.estimate, y, kind.marker, color=kind.color, mfc=face, ms=4.8, zorder=4, clip_on=False)
            if name in panel.paper:
                axes.plot(panel.paper[name], y, zorder=3, clip_on=False, **_PAPER)
    axes.set_xlim(-0.04, 1.04)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel(f"{label}\n{count_of(panel, arms, series)}")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelsize=8)
    for edge in range(len(arms) - 1):
        axes.axhline(edge + 0.5, color="#E8E8E8", lw=0.7, zorder=0)


def count_of(panel: Panel, arms: Sequence[str], series: Sequence[Series]) -> str:
    """`n = 60` for the dots of `draw_rates`, or a range where dots differ."""
    names = [kind.effect.format(arm=arm) for kind in series for arm in arms]
    counts = sorted({panel.effects[name].n for name in names if name in panel.effects})
    return f"n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "") if counts else ""


def name_arms(axes: Axes, labels: Mapping[str, str]) -> None:
    """Label the lines; columns share their axis, so naming them once names them for all."""
    axes.set_yticks(range(len(labels)), list(labels.values()))


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
    handles.append(Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="95% interval"))
    return [*handles, Line2D([], [], label="the paper's value", **_PAPER)] if paper else handles


def rates_by_model(axes: Axes, panels: Sequence[Panel], labels: Mapping[str, str], title: str, side: str) -> None:
    """Shares side by side, models beside each other in their colours, for the section's figure.

    Args:
        axes: to draw on.
        panels: the models.
        labels: on the axis, by the effect's name.
        title: of the axes.
        side: label of the vertical axis.
    """
    draw_by_model(axes, panels, labels, limits=(0.0, 1.0))
    axes.set_xticks(range(len(labels)), list(labels.values()), rotation=40, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(-0.05, 1.05)
    axes.set_ylabel(side)
    axes.set_title(title)
