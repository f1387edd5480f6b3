"""Dose curves by the names of effects; goes when the last figure is a spec."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.doses import dose_axis, dose_key
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


__all__ = ["dose_axis", "dose_key", "draw_dose", "levels", "sizes_of"]


def sizes_of(panel: Panel, selection: str, metric: str) -> list[int]:
    """The sizes k for which the panel has an effect `selection_k.metric`, in order."""
    pattern = re.compile(rf"{re.escape(selection)}_(\d+)\.{re.escape(metric)}")
    return sorted(int(match[1]) for match in map(pattern.fullmatch, panel.effects) if match)


def draw_dose(
    axes: Axes, panel: Panel, selection: str, metric: str, *, color: str, label: str | None = None, **line: Any
) -> None:
    """One curve `selection_k.metric` over k with its interval, and the paper's values as diamonds.

    `line` goes to matplotlib's `plot`.
    """
    sizes = sizes_of(panel, selection, metric)
    if not sizes:
        return
    effects = [panel.effects[f"{selection}_{size}.{metric}"] for size in sizes]
    # An unbounded end must not stretch the axis.
    low = np.clip([effect.low for effect in effects], -0.5, 1.5)
    high = np.clip([effect.high for effect in effects], -0.5, 1.5)
    axes.fill_between(sizes, low, high, color=color, alpha=0.18, lw=0, zorder=2)
    style: dict[str, Any] = {"marker": "o", "ms": 3.5, "lw": 1.5, "zorder": 3} | line
    axes.plot(sizes, [effect.estimate for effect in effects], color=color, label=label, **style)
    paper = {
        size: panel.paper[f"{selection}_{size}.{metric}"] for size in sizes if _known(panel, selection, size, metric)
    }
    if paper:
        axes.plot(list(paper), list(paper.values()), "D", ms=5, mfc="white", mec=color, mew=1.2, zorder=4)


def _known(panel: Panel, selection: str, size: int, metric: str) -> bool:
    return f"{selection}_{size}.{metric}" in panel.paper
