"""Effects over the number of positions they act on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.probes.base import Panel
from kvprobe.report.figures import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def dose_axis(axes: Axes, sizes: Sequence[int], label: str = "patched positions") -> None:
    """A logarithmic axis of sizes with the sizes themselves as ticks."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def levels(axes: Axes, *heights: float) -> None:
    """Dashed lines at reference heights."""
    for height in heights:
        axes.axhline(height, color=COLORS["ink"], lw=0.8, ls=(0, (4, 3)), zorder=1)


def dose_key(curves: Mapping[str, str], *, paper: bool) -> list[Any]:
    """Legend handles: a line for each label and colour, the interval and, where there are any, the paper's values."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], marker="o", ms=3.5, lw=1.5, color=color, label=label) for label, color in curves.items()
    ]
    handles.append(Patch(color=COLORS["ink"], alpha=0.18, lw=0, label="interval"))
    if paper:
        handles.append(
            Line2D([], [], marker="D", ls="", ms=5, mfc="white", mec=COLORS["ink"], mew=1.2, label="the paper's value")
        )
    return handles


def _known(panel: Panel, selection: str, size: int, metric: str) -> bool:
    return f"{selection}_{size}.{metric}" in panel.paper
