"""Lines over layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS, levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Profiles:
    """A row of a figure: lines over layers.

    Args:
        lines: of a panel: by label, values indexed by layer, the colour and the marker.
        ylabel: of the leftmost axes.
        height: of the row, in inches.
        levels: heights of dashed reference lines.
        xlabel: of every axes.
        ylim: ends of the vertical axis, where they are fixed.
        marks: of a panel: layers where an upright dotted line stands, and its colour.
        mark: what such a line means.
        nested: whether each line is thinner than the one before, so that lines on one another can be seen.
    """

    lines: Callable[[Panel], Mapping[str, tuple[pd.Series, str, str]]]
    ylabel: str
    height: float
    levels: tuple[float, ...] = ()
    xlabel: str = "layer"
    ylim: tuple[float | None, float | None] | None = None
    marks: Callable[[Panel], Iterable[tuple[float, str]]] | None = None
    mark: str = ""
    nested: bool = False

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the lines of one model."""
        levels(axes, *self.levels)
        draw_profile(axes, self.lines(panel), nested=self.nested)
        axes.set_xlabel(self.xlabel)
        for layer, color in self.marks(panel) if self.marks else ():
            axes.axvline(layer, color=color, lw=1.0, ls=":", zorder=2)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """Legend handles: the lines of the first model that was measured."""
        from matplotlib.lines import Line2D

        measured = next((panel for panel in panels if panel.effects), None)
        lines = self.lines(measured) if measured else {}
        handles = [
            Line2D([], [], color=color, marker=marker, ms=4, lw=1.5, label=label)
            for label, (_, color, marker) in lines.items()
        ]
        if self.marks:
            handles.append(Line2D([], [], color=COLORS["ink"], lw=1.0, ls=":", label=self.mark))
        return handles


def draw_profile(axes: Axes, profiles: Mapping[str, tuple[pd.Series, str, str]], *, nested: bool = False) -> None:
    """Lines over layers.

    Args:
        axes: to draw on.
        profiles: by label, values indexed by layer, the colour and the marker.
        nested: whether each line is thinner than the one before.
    """
    widths = np.linspace(4.0, 1.2, len(profiles)) if nested else [1.5] * len(profiles)
    for (label, (values, color, marker)), width in zip(profiles.items(), widths, strict=True):
        axes.plot(
            values.index, values, color=color, marker=marker, ms=4, lw=width, label=label, clip_on=False, zorder=3
        )
    layers = max((int(max(values.index)) + 1 for values, _, _ in profiles.values() if len(values)), default=1)
    axes.set_xticks(range(0, layers, max(1, layers // 6)))
    axes.set_xlabel("layer")
