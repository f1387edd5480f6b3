"""The figure of the attention-against-MLP probe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import COLORS, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PLACES = {
    "note": ("at the note", COLORS["vermilion"], "o"),
    "decision": ("at the decision", COLORS["blue"], "s"),
}
_SOURCES = {
    "before": "before\nthe field",
    "field": "field",
    "session_rest": "session",
    "policy": "policy",
    "conversation": "conver-\nsation",
    "task": "task",
    "self": "itself",
}
_HALF = 0.4


def draw_attn_vs_mlp(panels: Sequence[Panel]) -> Figure:
    """Attention's share by read layer, what each layer writes, and where attention reads; one column for each model."""
    from matplotlib.lines import Line2D

    with styled():
        figure, (shares, written, sources) = panel_grid(panels, heights=(2.0, 2.0, 2.0))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            levels(shares[column], 0.5)
            for place, (_, color, marker) in _PLACES.items():
                _draw_shares(shares[column], panel, place, color, marker)
                _draw_written(written[column], panel, place, color)
            shares[column].set_ylim(-0.05, 1.1)
            shares[column].set_xlabel("read after layer")
            levels(written[column], 0.0)
            written[column].set_xlabel("layer")
            _draw_sources(sources[column], panel)
        shares[0].set_ylabel("attention's share\nof the change")
        written[0].set_ylabel("written by one layer,\nshare of the change")
        sources[0].set_ylabel("brought by attention,\nshare of the change")
        figure.suptitle("Does attention or do MLPs write what a changed field changes?", fontsize=11)
        handles = [
            Line2D([], [], color=color, marker=marker, ms=4, label=label) for label, color, marker in _PLACES.values()
        ]
        handles += [
            Line2D([], [], color=COLORS["ink"], ls="-", label="attention of one layer"),
            Line2D([], [], color=COLORS["ink"], ls=":", label="MLP of one layer"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _layers_of(panel: Panel, prefix: str) -> list[int]:
    pattern = re.compile(rf"{re.escape(prefix)}_(\d+)")
    return sorted(int(match[1]) for match in map(pattern.fullmatch, panel.effects) if match)


def _draw_shares(axes: Axes, panel: Panel, place: str, color: str, marker: str) -> None:
    prefix = f"{place}.attention_share"
    layers = _layers_of(panel, prefix)
    effects = [panel.effects[f"{prefix}_{layer}"] for layer in layers]
    ends = np.array([(effect.low, effect.high) for effect in effects])
    # Where next to nothing has changed yet the share is unbounded.
    bounded = np.isfinite(ends).all(axis=1)
    axes.fill_between(layers, ends[:, 0], ends[:, 1], where=list(bounded), color=color, alpha=0.18, lw=0, zorder=2)
    axes.plot(layers, [effect.estimate for effect in effects], color=color, marker=marker, ms=4, lw=1.5, zorder=3)
    paper = {layer: panel.paper[f"{prefix}_{layer}"] for layer in layers if f"{prefix}_{layer}" in panel.paper}
    axes.plot(list(paper), list(paper.values()), "D", ms=5, mfc="white", mec=color, mew=1.2, zorder=4)
    axes.set_xticks(layers[:: max(1, len(layers) // 6)])


def _draw_written(axes: Axes, panel: Panel, place: str, color: str) -> None:
    for kind, style in (("attention", "-"), ("mlp", ":")):
        layers = _layers_of(panel, f"{place}.{kind}_of_layer")
        heights = [panel.effects[f"{place}.{kind}_of_layer_{layer}"].estimate for layer in layers]
        axes.plot(layers, heights, color=color, ls=style, lw=1.6, marker=".", ms=5, zorder=3)
        axes.set_xticks(layers[:: max(1, len(layers) // 6)])


def _draw_sources(axes: Axes, panel: Panel) -> None:
    """What attention brings from each source, all layers together; the segments that every prompt has."""
    levels(axes, 0.0)
    for number, (place, (_, color, _)) in enumerate(_PLACES.items()):
        for at, source in enumerate(_SOURCES):
            effect = panel.effects.get(f"{place}.from_{source}")
            if effect is None:
                continue
            middle = at + (number - 0.5) * _HALF
            axes.bar(middle, effect.estimate, _HALF, color=color, alpha=0.8, zorder=2)
            axes.plot([middle] * 2, np.clip([effect.low, effect.high], -0.5, 1.5), color=COLORS["ink"], lw=1, zorder=3)
    axes.set_xticks(range(len(_SOURCES)), list(_SOURCES.values()), fontsize=6.5, rotation=60)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("where attention brings it from")


def attn_vs_mlp_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Attention's share at the note (solid) and at the decision (dashed) over the depth, all models."""
    levels(axes, 0.5)
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        for place, style in (("note", "-"), ("decision", "--")):
            layers = _layers_of(panel, f"{place}.attention_share")
            shares = [panel.effects[f"{place}.attention_share_{layer}"].estimate for layer in layers]
            depth = [layer / max(1, layers[-1]) for layer in layers]
            axes.plot(depth, shares, color=color, ls=style, lw=1.5, label=panel.model if style == "-" else None)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("depth of the read layer")
    axes.set_ylabel("attention's share")
    axes.set_title("Attention's share, note; dashed: decision")
