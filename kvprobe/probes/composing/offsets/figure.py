"""The figure of the offsets probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel
from kvprobe.probes.composing.offsets.probe import ARMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "rotated": ("rotated", {"color": COLORS["blue"], "marker": "o"}),
    "rotated_in_context": ("rotated, own context", {"color": COLORS["sky"], "marker": "v", "ls": "--"}),
    "no_rotation": ("not rotated", {"color": COLORS["vermilion"], "marker": "s"}),
    "no_rotation_in_context": (
        "not rotated, own context",
        {"color": COLORS["orange"], "marker": "^", "ls": "--"},
    ),
    "removed": ("no rule", {"color": COLORS["grey"], "marker": "x", "ls": ":"}),
}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mew": 1.3, "zorder": 5}
_KEYS = {"rotated": "rotated_error", "no_rotation": "unrotated_error"}
_KEY_LIMITS = (1e-8, 10.0)
_MARGIN_LIMITS = (1e-5, 30.0)


def draw_offsets(panels: Sequence[Panel]) -> Figure:
    """Key error, margin error and agreement over the offset, cosine over the filler; one column for each model."""
    with styled():
        figure, grid = panel_grid(panels, heights=(2.0, 2.0, 2.0, 2.0))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            _draw_keys(grid[0][column], panel)
            _draw_arms(grid[1][column], panel, "offset", "margin_error", _MARGIN_LIMITS)
            _draw_arms(grid[2][column], panel, "offset", "agreement", (0.0, 1.0))
            _draw_arms(grid[3][column], panel, "filler", "cosine", (-1.0, 1.0))
            _draw_reference(grid[2][column], panel)
            for row in grid[:3]:
                row[column].set_xlabel("positions moved")
            grid[3][column].set_xlabel("tokens of filler before the chunk")
        labels = ("largest error of a key\n(share of its norm)", "error of the margin\n(logits)")
        for row, label in zip(grid, (*labels, "decides as the\nprefill there", "cosine of logits"), strict=True):
            row[0].set_ylabel(label)
        for row, limits in ((grid[0], _KEY_LIMITS), (grid[1], _MARGIN_LIMITS)):
            row[0].set_yscale("log")
            row[0].set_ylim(*limits)
        grid[2][0].set_ylim(-0.05, 1.08)
        if first_measured(panels) is not None:
            paper = any(panel.paper for panel in panels)
            figure.legend(handles=_key(paper=paper), loc="outside lower center", ncols=4 if len(panels) > 1 else 2)
        figure.suptitle("A chunk moved to other positions", fontsize=11)
    return figure


def offsets_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Agreement over the offset: rotated as a full line, not rotated dashed; all models."""
    for panel in (panel for panel in panels if panel.effects):
        color, sizes = model_color(panels, panel), sizes_of(panel, "offset")
        for arm, ls in (("rotated", "-"), ("no_rotation", "--")):
            values = [panel.effects[f"offset_{size}.{arm}.agreement"].estimate for size in sizes]
            label = panel.model if arm == "rotated" else None
            axes.plot(range(len(sizes)), values, ls=ls, marker="o", ms=3.5, lw=1.3, color=color, label=label)
        axes.set_xticks(range(len(sizes)), [_short(size) for size in sizes])
    axes.axhline(0.5, color=COLORS["ink"], lw=0.8, ls=(0, (1, 2)), zorder=1)
    axes.set_ylim(-0.05, 1.08)
    axes.set_xlabel("positions moved (dashed: not rotated)")
    axes.set_ylabel("decides as the prefill there")
    axes.set_title("Chunks moved far")


def sizes_of(panel: Panel, kind: str) -> list[int]:
    """The offsets or the fillers that were measured, smallest first."""
    names = [name.split(".")[0] for name in panel.effects if name.startswith(f"{kind}_")]
    return sorted({int(name.rpartition("_")[2]) for name in names})


def _draw_keys(axes: Axes, panel: Panel) -> None:
    sizes = sizes_of(panel, "offset")
    for arm, column in _KEYS.items():
        values = [panel.effects[f"offset_{size}.keys.{column}"].estimate for size in sizes]
        axes.plot(range(len(sizes)), np.clip(values, *_KEY_LIMITS), ms=4, lw=1.4, **_LOOKS[arm][1])
    axes.set_xticks(range(len(sizes)), [_short(size) for size in sizes])


def _draw_arms(axes: Axes, panel: Panel, kind: str, quantity: str, limits: tuple[float, float]) -> None:
    sizes = sizes_of(panel, kind)
    for arm in ARMS:
        style = _LOOKS[arm][1]
        if any(f"{kind}_{size}.{arm}.{quantity}" not in panel.effects for size in sizes):
            continue
        effects = [panel.effects[f"{kind}_{size}.{arm}.{quantity}"] for size in sizes]
        low, middle, high = (
            np.clip([getattr(effect, end) for effect in effects], *limits) for end in ("low", "estimate", "high")
        )
        axes.fill_between(range(len(sizes)), low, high, color=style["color"], alpha=0.12, lw=0)
        axes.plot(range(len(sizes)), middle, ms=4, lw=1.4, **style)
        for place, size in enumerate(sizes):
            value = panel.paper.get(f"{kind}_{size}.{arm}.{quantity}")
            if value is not None:
                axes.plot(place, value, mec=style["color"], **_PAPER)
    axes.set_xticks(range(len(sizes)), [_short(size) for size in sizes])


def _draw_reference(axes: Axes, panel: Panel) -> None:
    sizes = sizes_of(panel, "offset")
    values = [panel.effects[f"offset_{size}.reference.accuracy"].estimate for size in sizes]
    axes.plot(range(len(sizes)), values, color=COLORS["ink"], lw=1.0, ls=":", zorder=1)


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 else str(size)


def _key(*, paper: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Line2D([], [], ms=4, lw=1.4, label=label, **style) for label, style in _LOOKS.values()]
    handles.append(Patch(color=COLORS["ink"], alpha=0.2, lw=0, label="95% interval"))
    handles.append(Line2D([], [], color=COLORS["ink"], lw=1.0, ls=":", label="right decisions of the prefill"))
    return [*handles, Line2D([], [], mec=COLORS["ink"], label="the paper's value", **_PAPER)] if paper else handles
