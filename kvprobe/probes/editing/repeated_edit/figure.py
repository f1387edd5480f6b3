"""The figure of the repeated-edit probe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel
from kvprobe.probes.editing.repeated_edit.probe import ARMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# As in the frontier's figure, where the methods are the same.
_ARMS = {
    "stale": ("stale", COLORS["grey"], "o"),
    "field_only": ("field only", COLORS["sky"], "s"),
    "stacked_errata": ("errata, all kept", COLORS["purple"], "X"),
    "erratum": ("erratum, current alone", COLORS["vermilion"], "o"),
    "field_and_erratum": ("field + erratum", COLORS["orange"], "^"),
    "hoist_to_end": ("hoist to the end", COLORS["green"], "<"),
    "full_downstream": ("full downstream", COLORS["ink"], "s"),
}
_KINDS = {"untouched": "field not\nedited yet", "first": "value\nnew", "return": "return to\nan earlier\nvalue"}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "none", "mew": 1.3, "zorder": 5}


def draw_repeated_edit(panels: Sequence[Panel]) -> Figure:
    """Error rate over the number of edits, and by what the decision turns on; one column for each model."""
    with styled():
        figure, grid = panel_grid(panels, heights=(2.6, 2.6))
        for column, panel in enumerate(panels):
            if panel.effects:
                _draw_chain(grid[0][column], panel)
                _draw_kinds(grid[1][column], panel)
        for row in grid:
            row[0].set_ylabel("share of wrong decisions")
            row[0].set_ylim(-0.04, 1.06)
        if first_measured(panels) is not None:
            figure.legend(handles=_key(any(panel.paper for panel in panels)), loc="outside lower center", ncols=4)
        figure.suptitle("Two fields edited again and again: does the decision follow the current state?", fontsize=11)
    return figure


def repeated_edit_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Right decisions on values that were held earlier, by method, all models side by side."""
    labels = {f"{arm}.return.correct_rate": _ARMS[arm][0] for arm in ARMS}
    draw_by_model(axes, panels, labels, (0.0, 1.0))
    axes.tick_params(axis="x", labelsize=7)
    for label in axes.get_xticklabels():
        label.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.set_ylim(-0.05, 1.05)
    axes.set_ylabel("share of right decisions")
    axes.set_title("Returns to an earlier value")


def _draw_chain(axes: Axes, panel: Panel) -> None:
    """One line for each arm, over windows of edits."""
    for number, arm in enumerate(ARMS):
        pattern = re.compile(rf"{arm}\.edits_(\d+)\.error_rate")
        ends = sorted(int(match[1]) for match in map(pattern.fullmatch, panel.effects) if match)
        effects = [panel.effects[f"{arm}.edits_{end}.error_rate"] for end in ends]
        _, color, marker = _ARMS[arm]
        shift = 0.06 * (ends[0] if ends else 1) * (number - len(ARMS) / 2)
        places = [end + shift for end in ends]
        axes.plot(places, [e.estimate for e in effects], marker=marker, ms=4, lw=1.2, color=color, zorder=3)
        for place, effect in zip(places, effects, strict=True):
            axes.plot([place] * 2, [effect.low, effect.high], color=color, lw=2.5, alpha=0.3, solid_capstyle="butt")
        if ends and number == 0:
            axes.set_xticks(ends, [f"{end - ends[0] + 1}–{end}" for end in ends])
    axes.set_xlabel("edits so far")


def _draw_kinds(axes: Axes, panel: Panel) -> None:
    kinds = [kind for kind in _KINDS if f"{ARMS[-1]}.{kind}.error_rate" in panel.effects]
    for number, arm in enumerate(ARMS):
        _, color, marker = _ARMS[arm]
        for place, kind in enumerate(kinds):
            effect, at = panel.effects[f"{arm}.{kind}.error_rate"], place + 0.11 * (number - (len(ARMS) - 1) / 2)
            axes.plot([at] * 2, [effect.low, effect.high], color=color, lw=3.0, alpha=0.35, solid_capstyle="butt")
            axes.plot(at, effect.estimate, marker, color=color, ms=4.5, zorder=3, clip_on=False)
            paper = panel.paper.get(f"{arm}.{kind}.correct_rate")
            if paper is not None:
                axes.plot(at, 1 - paper, mec=color, clip_on=False, **_PAPER)
    names = [f"{_KINDS[kind]}\n(n = {panel.effects[f'{ARMS[-1]}.{kind}.error_rate'].n})" for kind in kinds]
    axes.set_xticks(range(len(kinds)), names)
    axes.tick_params(axis="x", length=0, labelsize=8)
    axes.set_xlim(-0.5, len(kinds) - 0.5)


def _key(paper: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], marker=marker, lw=1.2, ms=4.5, color=color, label=label)
        for label, color, marker in _ARMS.values()
    ]
    handles.append(Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="interval"))
    if paper:
        handles.append(Line2D([], [], mec=COLORS["ink"], label="the paper's value", **_PAPER))
    return handles
