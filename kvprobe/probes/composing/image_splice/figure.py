"""The figure of the image splice probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.figures.legacy.doses import sizes_of
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "moved": ("moved along all axes", COLORS["blue"], "o"),
    "temporal_only": ("temporal axis only", COLORS["orange"], "s"),
    "no_rotation": ("not rotated", COLORS["vermilion"], "^"),
    "wrong_image": ("another image", COLORS["grey"], "x"),
}
_SMALLEST = 1e-9
# Each curve a little to the side, since several lie on one another.
_APART = {"moved": -0.12, "temporal_only": -0.04, "no_rotation": 0.04, "wrong_image": 0.12}


def draw_image_splice(panels: Sequence[Panel]) -> Figure:
    """Distance from a full prefill, and agreement with it, over the shift; one column for each model."""
    with styled():
        figure, (distances, agreements) = panel_grid(panels, heights=(2.7, 2.3))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for arm in _ARMS:
                _draw(distances[column], panel, arm, "kl")
                _draw(agreements[column], panel, arm, "agreement")
            for axes in (distances[column], agreements[column]):
                _shift_axis(axes, panel)
            _decades(distances[column], panel)
            agreements[column].set_ylim(-0.04, 1.06)
            if "moved_0.agreement" in panel.paper:
                agreements[column].plot(
                    0, panel.paper["moved_0.agreement"], "D", ms=6, mfc="none", mec=COLORS["ink"], clip_on=False
                )
        first = first_measured(panels)
        if first is not None:
            distances[first].set_ylabel("KL from a full prefill\n(nats)")
            agreements[first].set_ylabel("same answer as\na full prefill")
            figure.legend(handles=_key(paper=any(p.paper for p in panels)), loc="outside lower center", ncols=3)
        figure.suptitle("An image's KV put where it was not computed", fontsize=11)
    return figure


def image_splice_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """KL over the shift: moved (solid) and not rotated (dashed), all models."""
    measured = [panel for panel in panels if panel.effects]
    for panel in measured:
        color = model_color(panels, panel)
        _draw(axes, panel, "moved", "kl", color=color, label=panel.model)
        _draw(axes, panel, "no_rotation", "kl", color=color, marker="", ls="--")
    if measured:
        _shift_axis(axes, measured[0])
        for panel in measured:
            _decades(axes, panel)
    axes.set_ylabel("KL from a full prefill (nats)")
    axes.set_title("Image KV: moved (solid), not rotated (dashed)")


def _draw(
    axes: Axes,
    panel: Panel,
    arm: str,
    metric: str,
    *,
    color: str | None = None,
    marker: str | None = None,
    label: str | None = None,
    ls: str = "-",
) -> None:
    _, own_color, own_marker = _ARMS[arm]
    color, marker = color or own_color, own_marker if marker is None else marker
    shifts = sizes_of(panel, arm, metric)
    effects = [panel.effects[f"{arm}_{shift}.{metric}"] for shift in shifts]
    places = np.arange(len(shifts)) + _APART[arm]
    heights = [max(effect.estimate, _SMALLEST) for effect in effects]
    axes.plot(places, heights, ls, marker=marker, color=color, ms=4.5, lw=1.3, label=label, zorder=3)
    for place, effect in zip(places, effects, strict=True):
        ends = np.clip([effect.low, effect.high], _SMALLEST if metric == "kl" else 0.0, None)
        axes.plot([place, place], ends, color=color, lw=2.5, alpha=0.3, solid_capstyle="butt", zorder=2)


def _shift_axis(axes: Axes, panel: Panel) -> None:
    """One place for each shift: they begin with 0 and grow by powers."""
    shifts = sizes_of(panel, "moved", "kl")
    axes.set_xticks(range(len(shifts)), [f"{shift:,}" for shift in shifts])
    axes.set_xlim(-0.4, len(shifts) - 0.6)
    axes.set_xlabel("further positions moved")


def _decades(axes: Axes, panel: Panel) -> None:
    """A logarithmic axis down to a little below the smallest estimate: intervals may reach down to nothing at all."""
    estimates = [panel.effects[f"{arm}_{s}.kl"].estimate for arm in _ARMS for s in sizes_of(panel, arm, "kl")]
    lowest = max(min(estimates) / 5, _SMALLEST)
    bottom = axes.get_ylim()[0] if axes.get_yscale() == "log" else lowest
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(bottom, lowest))


def _key(*, paper: bool) -> list[object]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[object] = [
        Line2D([], [], marker=marker, ms=4.5, lw=1.3, color=color, label=label)
        for label, color, marker in _ARMS.values()
    ]
    handles.append(Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="interval"))
    if paper:
        handles.append(
            Line2D([], [], ls="", marker="D", ms=6, mfc="none", mec=COLORS["ink"], label="the paper's value")
        )
    return handles
