"""The figure of the selection criterion probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.legacy.doses import sizes_of
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CRITERIA = {
    "random": ("at random", COLORS["grey"]),
    "suffix": ("the last tokens", COLORS["blue"]),
    "first_layer_deviation": ("change in first layers", COLORS["blue"]),
    "decision_attention": ("attention of the decision", COLORS["blue"]),
    "profile": ("profile: effect,\nother skeletons", COLORS["green"]),
    "profile_same_field": ("profile: effect,\nsame field", COLORS["green"]),
    "profile_kv_change": ("profile: KV change,\nother skeletons", COLORS["green"]),
    "in_sample": ("effect on this pair\n(upper bound)", COLORS["vermilion"]),
    "kv_change": ("KV change of this pair\n(upper bound)", COLORS["vermilion"]),
}
_COPIED: dict[str, Any] = {"marker": "|", "ls": "", "ms": 11, "mew": 2.0}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mew": 1.3, "zorder": 5}


def draw_selection_criterion(panels: Sequence[Panel]) -> Figure:
    """Recovery by criterion, recomputed and copied, a row for each size; one column for each model."""
    sizes = _sizes(panels)
    with styled():
        figure, grid = panel_grid(panels, heights=[3.1] * max(1, len(sizes)))
        for row, size in zip(grid, sizes, strict=False):
            for column, panel in enumerate(panels):
                if panel.effects:
                    _draw_criteria(row[column], panel, size)
            first = first_measured(panels)
            if first is not None:
                labels = [label for label, _ in reversed(_CRITERIA.values())]
                row[first].set_yticks(range(len(labels)), labels, fontsize=7.5)
        if sizes:
            figure.legend(handles=_key(panels), loc="outside lower center", ncols=4)
        figure.suptitle("Which few tokens after the field should an edit recompute?", fontsize=11)
    return figure


def selection_criterion_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Recovery by criterion at the largest size, recomputed, all models."""
    size = max(_sizes(panels), default=0)
    labels = {f"{name}_{size}.recovery": label.replace("\n", " ") for name, (label, _) in _CRITERIA.items()}
    draw_by_model(axes, panels, labels)
    axes.set_xticks(range(len(labels)), list(labels.values()), rotation=40, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("recovery")
    axes.set_title(f"Which {size} tokens are recomputed")


def _sizes(panels: Sequence[Panel]) -> list[int]:
    first = first_measured(panels)
    return [] if first is None else sizes_of(panels[first], "random", "recovery")


def _draw_criteria(axes: Axes, panel: Panel, size: int) -> None:
    for value in (0.0, 1.0):
        axes.axvline(value, color=COLORS["ink"], lw=0.8, ls=(0, (4, 3)), zorder=1)
    for place, (name, (_, color)) in enumerate(reversed(_CRITERIA.items())):
        effect, copied = (panel.effects.get(f"{name}_{size}.{how}recovery") for how in ("", "copied_"))
        if effect is None:
            continue
        ends = np.clip([effect.low, effect.high], -0.5, 1.5)
        axes.plot(ends, [place] * 2, color=color, lw=4, alpha=0.35, solid_capstyle="butt", zorder=2)
        axes.plot(effect.estimate, place, "o", color=color, ms=5, zorder=4, clip_on=False)
        if copied is not None:
            axes.plot(copied.estimate, place, color=color, zorder=3, **_COPIED)
        paper = panel.paper.get(f"{name}_{size}.copied_recovery")
        if paper is not None:
            axes.plot(paper, place, mec=color, **_PAPER)
    axes.set_xlim(-0.2, 1.25)
    axes.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
    axes.set_ylim(-0.6, len(_CRITERIA) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel(f"recovery, K = {size}")


def _key(panels: Sequence[Panel]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ink = COLORS["ink"]
    handles: list[Any] = [
        Line2D([], [], marker="o", ls="", ms=5, color=ink, label="recomputed"),
        Patch(color=ink, alpha=0.35, lw=0, label="its interval"),
        Line2D([], [], color=ink, label="copied from a full prefill", **_COPIED),
    ]
    if any(panel.paper for panel in panels):
        handles.append(Line2D([], [], mec=ink, label="the paper's value (copied)", **_PAPER))
    return handles
