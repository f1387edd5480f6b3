"""The figure of the wording probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel
from kvprobe.probes.mechanism.wording.probe import CONTEXTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {
    "none": "no line",
    "neutral": "neutral,\nas long",
    "old_value": "override,\nold value",
    "voids_conclusions": "voids\nearlier answer",
    "restatement": "plain\nrestatement",
    "update": "tagged\nupdate",
    "override": "tagged,\noverride",
}
_CONTEXTS = {
    "stale": ("old value in the context", COLORS["vermilion"], "o"),
    "in_place": ("new value at the field alone", COLORS["blue"], "s"),
    "recomputed": ("new value throughout", COLORS["green"], "^"),
}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mew": 1.3, "zorder": 5}


def draw_wording(panels: Sequence[Panel]) -> Figure:
    """Share of decisions for the new value by line, for each context; one column for each model."""
    with styled():
        figure, (row,) = panel_grid(panels, heights=(4.0,))
        for column, panel in enumerate(panels):
            if panel.effects:
                _draw_lines(row[column], panel)
        first = first_measured(panels)
        if first is not None:
            # The rows share their axis, so naming the lines once names them for all columns.
            row[first].set_yticks(range(len(_LINES)), list(_LINES.values())[::-1])
            figure.legend(handles=_key(), loc="outside lower center", ncols=3)
        mode = next((_mode(panel) for panel in panels if panel.effects), "direct")
        how = "after a chain of thought" if mode == "think" else "decided directly"
        figure.suptitle(f"What must a line before the task say to turn the decision? ({how})", fontsize=11)
    return figure


def wording_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Share of decisions for the new value on the stale context by line, all models side by side."""
    measured = [panel for panel in panels if panel.effects]
    step = 0.7 / max(1, len(measured))
    for number, panel in enumerate(measured):
        mode, shift = _mode(panel), step * (number - (len(measured) - 1) / 2)
        effects = [panel.effects[f"{mode}.stale.{line}.new_rate"] for line in _LINES]
        errors = [[e.estimate - e.low for e in effects], [e.high - e.estimate for e in effects]]
        places = [place + shift for place in range(len(_LINES))]
        color = model_color(panels, panel)
        estimates = [e.estimate for e in effects]
        axes.errorbar(places, estimates, yerr=errors, fmt="o", ms=4, lw=1.2, color=color, label=panel.model)
    axes.set_xticks(range(len(_LINES)), list(_LINES.values()), rotation=40, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylim(-0.05, 1.05)
    axes.set_ylabel("share of new decisions")
    axes.set_title("One line after a stale context")


def _draw_lines(axes: Axes, panel: Panel) -> None:
    mode = _mode(panel)
    for number, context in enumerate(CONTEXTS):
        _, color, marker = _CONTEXTS[context]
        for place, line in enumerate(reversed(_LINES)):
            name = f"{mode}.{context}.{line}.new_rate"
            effect, height = panel.effects[name], place - 0.24 * (number - 1)
            axes.plot([effect.low, effect.high], [height] * 2, color=color, lw=3.5, alpha=0.35, solid_capstyle="butt")
            axes.plot(effect.estimate, height, marker, color=color, ms=4.5, zorder=3, clip_on=False)
            if name in panel.paper:
                axes.plot(panel.paper[name], height, mec=color, clip_on=False, **_PAPER)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    for edge in range(len(_LINES) - 1):
        axes.axhline(edge + 0.5, color="#E3E3E3", lw=0.7, zorder=0)
    axes.set_xlim(-0.04, 1.04)
    axes.set_ylim(-0.55, len(_LINES) - 0.45)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlabel("share of decisions\nfor the new value")


def _mode(panel: Panel) -> str:
    return "think" if any(name.startswith("think.") for name in panel.effects) else "direct"


def _key() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], marker=marker, ls="", ms=4.5, color=color, label=label)
        for label, color, marker in _CONTEXTS.values()
    ]
    paper = Line2D([], [], mec=COLORS["ink"], label="the paper's value", **_PAPER)
    return [*handles, Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="interval"), paper]
