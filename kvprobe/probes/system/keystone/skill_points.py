"""How the figure of `keystone` shows an edit inside a composed skill: a point for each arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.by_model import model_color
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS
from kvprobe.stats import Effect

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours are those of headers or models, so arms differ in marker alone.
_ARMS = {
    "stale": ("stale", "o"),
    "field_only": ("field only", "s"),
    "selective_{size}": ("field + K most attended", "v"),
    "deviation_{size}": ("field + K most deviating", "d"),
    "cacheblend_{percent}": ("CacheBlend-style", "P"),
    "erratum": ("erratum", "p"),
    "field_and_erratum": ("field + erratum", "^"),
    "full_downstream": ("full downstream", "X"),
    "recompile": ("skill recompiled", "*"),
}
_HEADERS = {
    "none": ("compiled behind nothing", COLORS["vermilion"]),
    "bos": ("compiled behind BOS", COLORS["orange"]),
    "neutral": ("compiled behind a neutral line", COLORS["blue"]),
    "real": ("compiled in its place", COLORS["green"]),
}
_INTERVAL: dict[str, Any] = {"lw": 1.6, "alpha": 0.3}
_EQUAL: dict[str, Any] = {"color": COLORS["ink"], "lw": 0.9, "ls": (0, (5, 2))}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6.5, "mfc": "none", "mew": 1.1}


@dataclass(frozen=True)
class SkillPoints:
    """A row of the figure: what each arm does in the composed prompt, in the colour of the skill's header.

    Args:
        across: metric on the horizontal axis.
        up: metric on the vertical axis, of the composed prompt.
        xlabel: of every axes.
        ylabel: of the leftmost axes.
        xlim: ends of the horizontal axis; what lies outside is shown at its edge.
        ylim: ends of the vertical axis, likewise.
        beside: regime that `across` is read in; by default the composed one.
        numbered: whether K is written beside the points of the first header.
        height: of the row, in inches.
    """

    across: str
    up: str
    xlabel: str
    ylabel: str
    xlim: tuple[float, float]
    ylim: tuple[float, float]
    beside: str | None = None
    numbered: bool = False
    height: float = 3.0

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the arms of one model, behind every header."""
        headers = headers_of([panel])
        for header in headers:
            self.draw_arms(axes, panel, header, _HEADERS[header][1], numbered=self.numbered and header == headers[0])
        self.frame(axes)

    def draw_arms(self, axes: Axes, panel: Panel, header: str, color: str, *, numbered: bool = False) -> None:
        """Every arm of a model behind one header, with both intervals and the paper's value where there is one."""
        for marker, across, up in self._points(panel, header):
            place = across.estimate, up.estimate
            axes.plot(
                np.clip([across.low, across.high], *self.xlim), [place[1]] * 2, color=color, zorder=2, **_INTERVAL
            )
            axes.plot([place[0]] * 2, np.clip([up.low, up.high], *self.ylim), color=color, zorder=2, **_INTERVAL)
            size = 8.0 if marker == "*" else 5.5
            axes.plot(*place, marker, color=color, ms=size, alpha=0.85, mew=0, zorder=4, clip_on=False)
            if numbered and "size" in up.parameters:
                near: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "color": COLORS["ink"]}
                axes.annotate(str(up.parameters["size"]), place, (6, 4), zorder=5, **near)
            if across.name in panel.paper and up.name in panel.paper:
                theirs = np.clip(panel.paper[across.name], *self.xlim), np.clip(panel.paper[up.name], *self.ylim)
                axes.plot(*theirs, mec=color, zorder=3, clip_on=False, **_PAPER)

    def frame(self, axes: Axes) -> None:
        """The ends of the axes and, where both show the same metric, the line of no difference."""
        axes.set_xlim(*self.xlim)
        axes.set_ylim(*self.ylim)
        if self.across == self.up:
            axes.plot(self.xlim, self.xlim, zorder=1, **_EQUAL)
        axes.set_xlabel(self.xlabel)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """Legend handles: headers, arms, interval, no difference, the paper's value."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list[Any] = [Patch(color=_HEADERS[h][1], lw=0, label=_HEADERS[h][0]) for h in headers_of(panels)]
        handles += arm_handles(panels, COLORS["ink"], 6)
        handles.append(Line2D([], [], color=COLORS["ink"], label="interval", **_INTERVAL))
        if self.across == self.up:
            handles.append(Line2D([], [], label="no difference", **_EQUAL))
        if any(panel.paper for panel in panels if panel.effects):
            label = "the paper's value (its own denominators)"
            handles.append(Line2D([], [], mec=COLORS["ink"], label=label, **_PAPER))
        return handles

    def _points(self, panel: Panel, header: str) -> Iterator[tuple[str, Effect, Effect]]:
        composed = f"composed_{header}"
        for condition, (_, marker) in _ARMS.items():
            for up in panel.select(f"{composed}.{condition}", self.up):
                for across in panel.select(f"{self.beside or composed}.{condition}", self.across, **up.parameters):
                    yield marker, across, up


@dataclass(frozen=True)
class SkillPointsByModel:
    """The axes in the section's figure: the arms of all models behind one header.

    Args:
        part: the row of the probe's figure that is shown.
        header: which; the first that was measured where this one was not.
        title: the finding, in a few words.
    """

    part: SkillPoints
    header: str
    title: str

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw all models into one axes."""
        headers = headers_of(panels)
        header = self.header if self.header in headers or not headers else headers[0]
        for panel in (panel for panel in panels if panel.effects):
            color = model_color(panels, panel)
            self.part.draw_arms(axes, panel, header, color)
            axes.plot([], [], "-", color=color, label=panel.model)
        marks = arm_handles(panels, COLORS["grey"], 4)
        small: dict[str, Any] = {"fontsize": 5.5, "frameon": False, "handletextpad": 0.2, "labelspacing": 0.2}
        axes.legend(handles=marks, loc="upper left", **small)
        self.part.frame(axes)
        axes.set_ylabel(self.part.ylabel)
        axes.set_title(self.title)


def headers_of(panels: Sequence[Panel]) -> list[str]:
    """The headers behind which skills were compiled."""
    return [h for h in _HEADERS if any(panel.select(f"composed_{h}.stale", "recovery") for panel in panels)]


def arm_handles(panels: Sequence[Panel], color: str, size: float) -> list[Any]:
    """Legend handles of the arms that were measured."""
    from matplotlib.lines import Line2D

    measured = [f"composed_{header}" for header in headers_of(panels)]
    return [
        Line2D([], [], ls="", marker=marker, color=color, ms=size, mew=0, label=label)
        for condition, (label, marker) in _ARMS.items()
        if any(panel.select(f"{regime}.{condition}", "recovery") for panel in panels for regime in measured)
    ]
