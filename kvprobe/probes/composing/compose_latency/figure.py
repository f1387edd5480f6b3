"""The figure of the compose latency probe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.figures.legacy.doses import dose_axis, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and marker of each arm; those with a size in their name are found by its beginning.
_ARMS = {
    "full_prefill": ("full prefill", COLORS["ink"], "X"),
    "cacheblend": ("CacheBlend-style, 15%", COLORS["purple"], "P"),
    "splice_seam": ("splice, 8 tokens of seam", COLORS["orange"], "^"),
    "splice_from_disk": ("splice from disk", COLORS["sky"], "s"),
    "splice": ("splice", COLORS["vermilion"], "o"),
    "without_chunk": ("no chunk", COLORS["grey"], "."),
}
_AXIS = "tokens of the chunk"


def draw_compose_latency(panels: Sequence[Panel]) -> Figure:
    """Seconds to the first token and speed-up over a full prefill, both over the length of the chunk."""
    with styled():
        figure, (times, speed) = panel_grid(panels, heights=(2.9, 2.5))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for arm in _ARMS:
                _draw(times[column], panel, arm, "seconds")
                if arm not in ("full_prefill", "without_chunk"):
                    _draw(speed[column], panel, arm, "speedup")
            for row in (times, speed):
                dose_axis(row[column], sizes_of(panel, "splice", "seconds"), _AXIS)
            levels(speed[column], 1.0, 5.0)
            times[column].text(0.03, 0.97, _growth(panel), transform=times[column].transAxes, va="top", fontsize=7.5)
        for row, label in ((times, "seconds to the first token"), (speed, "speed-up over a full prefill")):
            row[0].set_yscale("log")
            first = first_measured(panels)
            row[0 if first is None else first].set_ylabel(label)
        _give_room(times, first_measured(panels))
        figure.legend(handles=_key(), loc="outside lower center", ncols=3 if len(panels) > 1 else 2)
        figure.suptitle("Time to the first token, by the length of the chunk", fontsize=11)
    return figure


def compose_latency_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Speed-up of a resident chunk (solid) and of one on disk (dashed) over the length, all models."""
    lengths: set[int] = set()
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        _draw(axes, panel, "splice", "speedup", color=color, label=panel.model)
        _draw(axes, panel, "splice_from_disk", "speedup", color=color, ls="--", marker="")
        lengths |= set(sizes_of(panel, "splice", "speedup"))
    levels(axes, 1.0, 5.0)
    if lengths:
        dose_axis(axes, sorted(lengths), _AXIS)
    axes.set_yscale("log")
    axes.set_ylabel("speed-up over a prefill")
    axes.set_title("First token: splice (solid), from disk (dashed)")


def _draw(axes: Axes, panel: Panel, arm: str, metric: str, **line: object) -> None:
    """One curve with its intervals, cut off where they would stretch the axis, and the paper's values as diamonds."""
    name = next((name for name in _names(panel, metric) if name == arm or _beginning(name) == arm), None)
    if name is None:
        return
    _, color, marker = _ARMS[arm]
    lengths = sizes_of(panel, name, metric)
    effects = [panel.effects[f"{name}_{length}.{metric}"] for length in lengths]
    found = np.array([effect.estimate for effect in effects])
    style: dict[str, object] = {"color": color, "marker": marker, "ms": 4, "lw": 1.4, "zorder": 3} | line
    low = np.clip([effect.low for effect in effects], found / 4, None)
    high = np.clip([effect.high for effect in effects], None, found * 4)
    axes.fill_between(lengths, low, high, color=style["color"], alpha=0.15, lw=0, zorder=2)
    axes.plot(lengths, found, **style)  # type: ignore[arg-type]
    paper = {
        size: panel.paper[f"{name}_{size}.{metric}"] for size in lengths if f"{name}_{size}.{metric}" in panel.paper
    }
    axes.plot(list(paper), list(paper.values()), "D", ms=5, mfc="white", mec=style["color"], mew=1.2, zorder=4)


def _names(panel: Panel, metric: str) -> list[str]:
    """Arms with an effect of that metric at some length, chunks of plain text left out."""
    pattern = re.compile(rf"(.+?)_\d+\.{metric}")
    found = [match[1] for match in map(pattern.fullmatch, panel.effects) if match and "_text" not in match[1]]
    return list(dict.fromkeys(found))


def _beginning(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _growth(panel: Panel) -> str:
    lines = []
    for arm, label in (("full_prefill", "full"), ("splice", "splice")):
        effect = panel.effects.get(f"{arm}.exponent")
        if effect is not None:
            lines.append(f"{label}: length^{effect.estimate:.2f} [{effect.low:.2f}, {effect.high:.2f}]")
    return "\n".join(lines)


def _give_room(row: Sequence[Axes], first: int | None) -> None:
    """Room above the curves for the exponents."""
    if first is not None:
        low, high = row[first].get_ylim()
        row[first].set_ylim(low, high * (high / low) ** 0.3)


def _key() -> list[object]:
    from matplotlib.lines import Line2D

    return [
        *(Line2D([], [], marker=marker, ms=4, color=color, label=label) for label, color, marker in _ARMS.values()),
        Line2D([], [], marker="D", ls="", ms=5, mfc="white", mec=COLORS["ink"], mew=1.2, label="the paper's value"),
    ]
