"""The figure of the frontier probe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel
from kvprobe.probes.editing.frontier.probe import pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UPPER_BOUND = "oracle_copy"
# Arms that differ in colour differ in marker too; those of one kind share the colour.
_LOOKS = {
    "stale": ("stale", COLORS["grey"], "o"),
    "field_only": ("field only", COLORS["sky"], "s"),
    "selective": ("field + K tokens", COLORS["blue"], "v"),
    "cacheblend": ("CacheBlend-style", COLORS["purple"], "P"),
    "erratum": ("erratum", COLORS["vermilion"], "p"),
    "field_and_erratum": ("field + erratum", COLORS["orange"], "^"),
    "hoist_to_end": ("hoist to the end", COLORS["green"], "<"),
    "full_downstream": ("full downstream", COLORS["ink"], "X"),
    "full_reprefill": ("full reprefill", COLORS["ink"], "*"),
    _UPPER_BOUND: ("field + K copied (upper bound)", COLORS["blue"], "x"),
}
_ROWS = (
    ("token_share", "correct_rate", "tokens run after the edit\n(share of a full prefill)", "share of right decisions"),
    ("flop_share", "recovery", "FLOPs of the edit\n(share of a full prefill)", "recovery of\nthe new decision"),
)


def draw_frontier(panels: Sequence[Panel]) -> Figure:
    """Right decisions over tokens, recovery over FLOPs; one column for each model."""
    with styled():
        figure, grid = panel_grid(panels, heights=(2.7, 2.5))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for row, (cost, gain, label, _) in zip(grid, _ROWS, strict=True):
                _draw_arms(row[column], panel, cost, gain)
                row[column].set_xlabel(label)
        for row, (_, _, _, label) in zip(grid, _ROWS, strict=True):
            row[0].set_ylabel(label)
        grid[0][0].set_ylim(-0.04, 1.06)
        grid[1][0].set_ylim(-0.25, 1.4)
        first = first_measured(panels)
        if first is not None:
            paper = any(panel.paper for panel in panels)
            columns = 4 if len(panels) > 1 else 2
            figure.legend(handles=_key(panels[first], paper=paper), loc="outside lower center", ncols=columns)
        figure.suptitle("What an edit costs, and whether it turns the decision", fontsize=11)
    return figure


def frontier_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Right decisions over tokens: every model's arms and its front."""
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        points = _points(panel, "token_share", "correct_rate")
        _draw_front(axes, points, color)
        for name, (cost, gain) in points.items():
            marker = _LOOKS[kind_of(name)][2]
            axes.plot(cost, gain, marker, color=color, ms=4, alpha=0.85, clip_on=False)
        axes.plot([], [], "-", color=color, label=panel.model)
    for label, _, marker in (look for kind, look in _LOOKS.items() if kind != _UPPER_BOUND):
        axes.plot([], [], marker, color=COLORS["grey"], ms=4, label=label)
    marks = axes.get_legend_handles_labels()[0][-len(_LOOKS) + 1 :]
    axes.legend(handles=marks, loc="center right", fontsize=6, frameon=False, handletextpad=0.2, labelspacing=0.25)
    axes.set_xlim(-0.03, 1.05)
    axes.set_ylim(-0.04, 1.06)
    axes.set_xlabel("tokens run (share of a prefill)")
    axes.set_ylabel("share of right decisions")
    axes.set_title("Cost and correctness of edits")


def kind_of(name: str) -> str:
    """The method of an arm, its size taken off: `selective` of `selective_8`."""
    return re.sub(r"_\d+$", "", name)


def _points(panel: Panel, cost: str, gain: str) -> dict[str, tuple[float, float]]:
    """Cost and gain of every arm but the upper bound."""
    names = [name.removesuffix(f".{cost}") for name in panel.effects if name.endswith(f".{cost}")]
    return {
        name: (panel.effects[f"{name}.{cost}"].estimate, panel.effects[f"{name}.{gain}"].estimate)
        for name in names
        if kind_of(name) in _LOOKS and kind_of(name) != _UPPER_BOUND
    }


def _draw_arms(axes: Axes, panel: Panel, cost: str, gain: str) -> None:
    levels(axes, 0.0, 1.0)
    points = _points(panel, cost, gain)
    _draw_front(axes, points, COLORS["ink"])
    bounds = [name.removesuffix(f".{cost}") for name in panel.effects if name.startswith(_UPPER_BOUND)]
    for name in [*points, *(name for name in bounds if f"{name}.{cost}" in panel.effects)]:
        _, color, marker = _LOOKS[kind_of(name)]
        across, up = panel.effects[f"{name}.{cost}"], panel.effects[f"{name}.{gain}"]
        low, high = np.clip([up.low, up.high], -0.5, 1.5)
        axes.plot([across.estimate] * 2, [low, high], color=color, lw=3, alpha=0.3, solid_capstyle="butt", zorder=2)
        axes.plot(across.estimate, up.estimate, marker, color=color, ms=_size(marker), zorder=4, clip_on=False)
        size = re.search(r"_(\d+)$", name)
        if size and kind_of(name) == "selective":
            place = (across.estimate, up.estimate)
            axes.annotate(size[1], place, (5, 3), textcoords="offset points", fontsize=7, color=color, zorder=5)
        if f"{name}.{cost}" in panel.paper and f"{name}.{gain}" in panel.paper:
            theirs = panel.paper[f"{name}.{cost}"], panel.paper[f"{name}.{gain}"]
            axes.plot(*theirs, "D", ms=6.5, mfc="none", mec=color, mew=1.2, zorder=3, clip_on=False)
    axes.set_xlim(-0.03, 1.06)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])


def _draw_front(axes: Axes, points: Mapping[str, tuple[float, float]], color: str) -> None:
    """The steps of what no other arm beats."""
    costs = {name: cost for name, (cost, _) in points.items()}
    gains = {name: gain for name, (_, gain) in points.items()}
    front = pareto_front(costs, gains)
    across = [*(costs[name] for name in front), 1.05]
    up = [*(gains[name] for name in front), gains[front[-1]]]
    axes.step(across, up, where="post", color=color, lw=1.0, ls=(0, (5, 2)), zorder=1)


def _size(marker: str) -> float:
    return 8.5 if marker == "*" else 6.0


def _key(panel: Panel, *, paper: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = {kind_of(name.split(".", maxsplit=1)[0]) for name in panel.effects}
    handles: list[Any] = [
        Line2D([], [], ls="", marker=marker, color=color, ms=_size(marker), label=label)
        for kind, (label, color, marker) in _LOOKS.items()
        if kind in drawn
    ]
    handles.append(Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="interval"))
    handles.append(Line2D([], [], color=COLORS["ink"], lw=1.0, ls=(0, (5, 2)), label="Pareto front"))
    if paper:
        handles.append(
            Line2D([], [], ls="", marker="D", ms=6.5, mfc="none", mec=COLORS["ink"], label="the paper's value")
        )
    return handles
