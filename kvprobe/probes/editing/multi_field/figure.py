"""The figure of the multi-field probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel
from kvprobe.probes.editing.multi_field.probe import ARMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "stale": "stale",
    "field_only": "field only",
    "cacheblend": "CacheBlend-style",
    "erratum": "erratum",
    "field_and_erratum": "field + erratum",
    "hoist_to_end": "hoist to the end",
    "full_downstream": "full downstream",
}
_DECISIONS = {
    "changed": ("decisions that the edits must turn", COLORS["vermilion"], "o"),
    "unchanged": ("decisions that they must leave", COLORS["blue"], "s"),
    "both": ("all decisions after both edits", COLORS["green"], "^"),
}
_BASELINE = "baseline.majority.correct_rate"
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mew": 1.3, "zorder": 5}


def draw_multi_field(panels: Sequence[Panel]) -> Figure:
    """Right decisions by arm, those that must turn apart from those that must stay; one column for each model."""
    with styled():
        figure, (row,) = panel_grid(panels, heights=(3.8,))
        for column, panel in enumerate(panels):
            if panel.effects:
                _draw_arms(row[column], panel)
        first = first_measured(panels)
        if first is not None:
            row[first].set_yticks(range(len(ARMS)), [_ARMS[arm] for arm in reversed(ARMS)])
            figure.legend(handles=_key(any(panel.paper for panel in panels)), loc="outside lower center", ncols=3)
        figure.suptitle("Two fields of one cached prompt are edited: which decisions are right?", fontsize=11)
    return figure


def multi_field_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Right decisions among those that the edits must turn, all models side by side."""
    draw_by_model(axes, panels, {f"{arm}.changed.correct_rate": _ARMS[arm] for arm in ARMS}, (0.0, 1.0))
    axes.tick_params(axis="x", labelsize=7)
    for label in axes.get_xticklabels():
        label.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.set_ylim(-0.05, 1.05)
    axes.set_ylabel("share of right decisions")
    axes.set_title("Edits of two fields")


def _draw_arms(axes: Axes, panel: Panel) -> None:
    for number, (kind, (_, color, marker)) in enumerate(_DECISIONS.items()):
        for place, arm in enumerate(reversed(ARMS)):
            name, height = f"{arm}.{kind}.correct_rate", place - 0.24 * (number - 1)
            if name not in panel.effects:
                continue
            effect = panel.effects[name]
            axes.plot([effect.low, effect.high], [height] * 2, color=color, lw=3.5, alpha=0.35, solid_capstyle="butt")
            axes.plot(effect.estimate, height, marker, color=color, ms=4.5, zorder=3, clip_on=False)
            if name in panel.paper:
                axes.plot(panel.paper[name], height, mec=color, clip_on=False, **_PAPER)
    if _BASELINE in panel.effects:
        axes.axvline(panel.effects[_BASELINE].estimate, color=COLORS["ink"], lw=0.9, ls=(0, (4, 3)), zorder=1)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    for edge in range(len(ARMS) - 1):
        axes.axhline(edge + 0.5, color="#E3E3E3", lw=0.7, zorder=0)
    axes.set_xlim(-0.04, 1.04)
    axes.set_ylim(-0.55, len(ARMS) - 0.45)
    axes.tick_params(axis="y", length=0, labelsize=8)
    everything = panel.effects[f"{ARMS[-1]}.correct_rate"]
    axes.set_xlabel(f"share of right decisions\n(n = {everything.n} from {everything.clusters} clusters)")


def _key(paper: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], marker=marker, ls="", ms=4.5, color=color, label=label)
        for label, color, marker in _DECISIONS.values()
    ]
    handles.append(Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="interval"))
    handles.append(Line2D([], [], color=COLORS["ink"], lw=0.9, ls=(0, (4, 3)), label="majority answer, all decisions"))
    if paper:
        handles.append(Line2D([], [], mec=COLORS["ink"], label="the paper's value", **_PAPER))
    return handles
