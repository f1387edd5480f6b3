"""The figure of the chain knockout probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.legacy.figures import COLORS, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "free": "nothing",
    "block_field": "field, from\nthe chain",
    "block_rule": "a bit of the rule,\nfrom the chain",
    "mask_field": "field",
    "mask_downstream": "prompt after\nthe field",
    "mask_chain": "chain",
    "mask_both": "prompt after\nfield and chain",
    "mask_random": "as many\nrandom tokens",
}
_CACHES = {
    "stale": ("stale", COLORS["grey"], "s"),
    "field_only": ("field only", COLORS["vermilion"], "o"),
    "new": ("new", COLORS["blue"], "^"),
}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 5.5, "mfc": "white", "mec": COLORS["ink"], "mew": 1.2}


def draw_chain_knockout(panels: Sequence[Panel]) -> Figure:
    """Share of decisions for the new value by arm and cache; one column for each model."""
    from matplotlib.lines import Line2D

    with styled():
        figure, (row,) = panel_grid(panels, heights=(3.6,))
        for axes, panel in zip(row, panels, strict=True):
            if not panel.effects:
                continue
            for number, (cache, (_, color, marker)) in enumerate(_CACHES.items()):
                _draw_arms(axes, panel, cache, (number - 1) * 0.24, color=color, marker=marker)
            _arm_axis(axes)
        row[0].set_ylabel("hidden")
        figure.suptitle(
            "Does a chain of thought read the field again, or does the decision need the notes?", fontsize=11
        )
        handles: list[Any] = [
            Line2D([], [], color=color, marker=marker, ls="-", ms=5, label=f"{label} cache")
            for label, color, marker in _CACHES.values()
        ]
        if any(panel.paper for panel in panels):
            handles.append(Line2D([], [], label="the paper's value, field only", **_PAPER))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def chain_knockout_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """The same on the field-only cache, all models."""
    measured = [panel for panel in panels if panel.effects]
    for number, panel in enumerate(measured):
        offset = (number - (len(measured) - 1) / 2) * 0.8 / max(1, len(measured))
        color = model_color(panels, panel)
        _draw_arms(axes, panel, "field_only", offset, color=color, marker="o", label=panel.model)
    _arm_axis(axes)
    axes.set_title("After a chain, by what was hidden")


def _draw_arms(
    axes: Axes, panel: Panel, cache: str, offset: float, *, color: str, marker: str, label: str | None = None
) -> None:
    for place, arm in enumerate(_ARMS):
        name = f"{arm}.{cache}.follows_new"
        if name not in panel.effects:
            continue
        effect, y = panel.effects[name], place + offset
        axes.plot([effect.low, effect.high], [y, y], color=color, lw=2.2, alpha=0.5, zorder=2, solid_capstyle="butt")
        axes.plot(effect.estimate, y, marker, ms=4.5, color=color, label=label, zorder=3, ls="")
        label = None
        if name in panel.paper:
            axes.plot(panel.paper[name], y, zorder=4, clip_on=False, **_PAPER)


def _arm_axis(axes: Axes) -> None:
    axes.set_yticks(range(len(_ARMS)), list(_ARMS.values()), fontsize=8)
    axes.set_ylim(len(_ARMS) - 0.5, -0.5)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("decisions for the new value")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    for place in range(len(_ARMS) - 1):
        axes.axhline(place + 0.5, color="#EEEEEE", lw=0.6, zorder=0)
