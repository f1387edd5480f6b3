"""The figure of the seam-repair probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel
from kvprobe.probes.composing.seam_repair.probe import FULL, HEADERS, REPAIRED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = {
    "none": ("no header", COLORS["vermilion"], "o"),
    "bos": ("beginning of text", COLORS["orange"], "s"),
    "neutral": ("neutral header", COLORS["blue"], "v"),
    "real": ("its own context", COLORS["green"], "^"),
}
_CACHES = {
    FULL: ("full prefill", COLORS["ink"]),
    "none": ("no header", COLORS["vermilion"]),
    REPAIRED: ("no header, 1 repaired", COLORS["purple"]),
    "bos": ("beginning of text", COLORS["orange"]),
    "neutral": ("neutral header", COLORS["blue"]),
    "real": ("its own context", COLORS["green"]),
}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mec": COLORS["ink"], "mew": 1.2}
_LIMITS = {"margin_error": (1e-4, 10.0), "cosine": (1e-6, 1.0)}
"""Of the axes: what is smaller, such as the rounding of equal caches, is drawn at the lower end."""


def draw_seam_repair(panels: Sequence[Panel]) -> Figure:
    """Margin error and cosine over the seam for each header, then the chunk's first token; one column each model."""
    with styled():
        figure, grid = panel_grid(panels, heights=(2.4, 2.4, 2.2))
        for column, panel in enumerate(panels):
            if panel.effects:
                _draw_seams(grid[0][column], panel, "margin_error")
                _draw_seams(grid[1][column], panel, "cosine")
                _draw_sinks(grid[2][column], panel)
        labels = (
            "error of the margin\n(logits)",
            "1 - cosine of logits",
            "attention of later tokens\non the chunk's first",
        )
        for row, label in zip(grid, labels, strict=True):
            row[0].set_ylabel(label)
        first = first_measured(panels)
        if first is not None:
            paper = any(panel.paper for panel in panels)
            figure.legend(handles=_key(paper=paper), loc="outside lower center", ncols=6 if len(panels) > 1 else 3)
        figure.suptitle("What a chunk is compiled behind, and how much of its seam is run again", fontsize=11)
    return figure


def seam_repair_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Margin error by header, without and with one repaired token, all models."""
    names = {
        f"{header}.seam_{seam}.margin_error": f"{_LOOKS[header][0]}, {seam}"
        for header in HEADERS[:-1]
        for seam in (0, 1)
    }
    draw_by_model(axes, panels, names, (0.0, _LIMITS["margin_error"][1]))
    axes.tick_params(axis="x", labelsize=6.5)
    for label in axes.get_xticklabels():
        label.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("error of the margin (logits)")
    axes.set_title("Header, and tokens repaired")


def _draw_seams(axes: Axes, panel: Panel, quantity: str) -> None:
    """One line for each header; a cosine as its distance from 1."""
    least, most = _LIMITS[quantity]
    seams = _seams(panel)
    for header, (_, color, marker) in _LOOKS.items():
        names = [f"{header}.seam_{seam}.{quantity}" for seam in seams]
        effects = [panel.effects[name] for name in names if name in panel.effects]
        if not effects:
            continue
        ends = np.array([[effect.low, effect.estimate, effect.high] for effect in effects])
        low, middle, high = np.clip(np.sort(1 - ends if quantity == "cosine" else ends, axis=1), least, most).T
        axes.fill_between(range(len(effects)), low, high, color=color, alpha=0.15, lw=0)
        axes.plot(range(len(effects)), middle, color=color, marker=marker, ms=4, lw=1.4, clip_on=False)
        for place, name in enumerate(names):
            if name in panel.paper:
                axes.plot(place, max(1 - panel.paper[name], least), zorder=5, **_PAPER)
    axes.set_xticks(range(len(seams)), [str(seam) for seam in seams])
    axes.set_yscale("log")
    axes.set_ylim(least, most)
    axes.set_xlabel("first tokens run where they stand")


def _draw_sinks(axes: Axes, panel: Panel) -> None:
    known = [cache for cache in _CACHES if f"sink.{cache}.attention" in panel.effects]
    for place, cache in enumerate(known):
        effect, color = panel.effects[f"sink.{cache}.attention"], _CACHES[cache][1]
        axes.plot([place, place], [effect.low, effect.high], color=color, lw=3, alpha=0.4, solid_capstyle="butt")
        axes.plot(place, effect.estimate, "o", ms=5, color=color)
    labels = [_CACHES[cache][0] for cache in known]
    axes.set_xticks(range(len(known)), labels, rotation=40, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_xlim(-0.5, len(known) - 0.5)


def _seams(panel: Panel) -> list[int]:
    ending = ".margin_error"
    cells = [name.split(".")[1] for name in panel.effects if name.startswith("none.seam_") and name.endswith(ending)]
    return sorted(int(cell.split("_")[1]) for cell in cells)


def _key(*, paper: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], color=color, marker=marker, ms=4, lw=1.4, label=label)
        for label, color, marker in _LOOKS.values()
    ]
    handles.append(Patch(color=COLORS["ink"], alpha=0.2, lw=0, label="95% interval"))
    return [*handles, Line2D([], [], label="the paper's value", **_PAPER)] if paper else handles
