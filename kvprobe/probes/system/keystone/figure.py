"""The figure of the keystone probe."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.legacy.figures import COLORS, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel
from kvprobe.probes.system.keystone.effects import RECOMPUTED
from kvprobe.stats import Effect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours are the models', so arms differ in marker alone.
_ARMS = {
    "stale": ("stale", "o"),
    "field_only": ("field only", "s"),
    "selective": ("field + K most attended", "v"),
    "deviation": ("field + K most deviating", "d"),
    "cacheblend": ("CacheBlend-style", "P"),
    "erratum": ("erratum", "p"),
    "field_and_erratum": ("field + erratum", "^"),
    "full_downstream": ("full downstream", "X"),
    "recompile": ("skill recompiled", "*"),
}
_HEADERS = {
    "none": "compiled behind nothing",
    "bos": "compiled behind BOS",
    "neutral": "compiled behind a neutral line",
    "real": "compiled in its place",
}
_LIMITS = (-0.25, 1.35)
_MAIN = "neutral"


def draw_keystone(panels: Sequence[Panel]) -> Figure:
    """Composed against recomputed recovery, and right decisions over cost; one column for each header."""
    from matplotlib.figure import Figure

    with styled():
        headers = _headers(panels) or [_MAIN]
        figure = Figure(figsize=(max(6.4, 0.8 + 3.1 * len(headers)), 7.4), layout="constrained")
        grid = figure.subplots(2, len(headers), squeeze=False, sharey="row")
        for column, header in enumerate(headers):
            _diagonal(grid[0][column], panels, header)
            _cost(grid[1][column], panels, header)
            grid[0][column].set_title(_HEADERS[header])
        grid[0][0].set_ylabel("recovery in the composed prompt")
        grid[1][0].set_ylabel("share of right decisions,\ncomposed prompt")
        notes = [f"{panel.model}: {panel.note or 'not measured'}" for panel in panels if not panel.effects]
        if notes:
            text = "\n".join(line for note in notes for line in textwrap.wrap(note, 44))
            grid[0][0].text(
                0.03, 0.97, text, transform=grid[0][0].transAxes, va="top", fontsize=7, color=COLORS["grey"]
            )
        figure.legend(handles=_key(panels), loc="outside lower center", ncols=4, fontsize=8)
        figure.suptitle("An edit inside a composed skill, beside the same edit in an ordinary cache", fontsize=11)
    return figure


def keystone_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Composed against recomputed recovery behind a neutral header, all models."""
    headers = _headers(panels)
    _diagonal(axes, panels, _MAIN if _MAIN in headers or not headers else headers[0])
    for panel in (panel for panel in panels if panel.effects):
        axes.plot([], [], "-", color=model_color(panels, panel), label=panel.model)
    for label, marker in _ARMS.values():
        axes.plot([], [], marker, color=COLORS["grey"], ms=4, ls="", label=label)
    marks = axes.get_legend_handles_labels()[0][-len(_ARMS) :]
    axes.legend(handles=marks, loc="upper left", fontsize=5.5, frameon=False, handletextpad=0.2, labelspacing=0.2)
    axes.set_ylabel("recovery, composed")
    axes.set_title("Edit inside a composed skill")


def _diagonal(axes: Axes, panels: Sequence[Panel], header: str) -> None:
    """Every arm of every model at (recomputed, composed), with both intervals."""
    axes.plot(_LIMITS, _LIMITS, color=COLORS["ink"], lw=0.9, ls=(0, (5, 2)), zorder=1)
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        for arm in _arms(panel, header):
            across, up = (panel.effects[f"{regime}.{arm}.recovery"] for regime in (RECOMPUTED, f"composed_{header}"))
            axes.plot(_ends(across), [up.estimate] * 2, color=color, lw=1.6, alpha=0.3, zorder=2)
            axes.plot([across.estimate] * 2, _ends(up), color=color, lw=1.6, alpha=0.3, zorder=2)
            axes.plot(across.estimate, up.estimate, _marker(arm), color=color, **_point(arm))
            _paper(axes, panel, header, arm, color)
    axes.set_xlim(*_LIMITS)
    axes.set_ylim(*_LIMITS)
    axes.set_xticks([0, 0.5, 1])
    axes.set_yticks([0, 0.5, 1])
    axes.set_xlabel("recovery after an ordinary prefill")


def _paper(axes: Axes, panel: Panel, header: str, arm: str, color: str) -> None:
    names = [f"{regime}.{arm}.recovery" for regime in (RECOMPUTED, f"composed_{header}")]
    if all(name in panel.paper for name in names):
        # The paper's ratios reach 11; those outside the axes are shown at their edge.
        across, up = np.clip([panel.paper[name] for name in names], *_LIMITS)
        axes.plot(across, up, "D", ms=6.5, mfc="none", mec=color, mew=1.1, zorder=3, clip_on=False)


def _cost(axes: Axes, panels: Sequence[Panel], header: str) -> None:
    """Right decisions over the share of a prefill's tokens that the edit ran."""
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        for arm in _arms(panel, header):
            name = f"composed_{header}.{arm}"
            cost, right = panel.effects[f"{name}.token_share"], panel.effects[f"{name}.correct_rate"]
            axes.plot([cost.estimate] * 2, [right.low, right.high], color=color, lw=1.6, alpha=0.3, zorder=2)
            axes.plot(cost.estimate, right.estimate, _marker(arm), color=color, **_point(arm))
    _name_sizes(axes, panels, header)
    axes.set_xlim(-0.04, 1.2)
    axes.set_ylim(-0.04, 1.06)
    axes.set_xlabel("tokens run by the edit\n(share of a full prefill)")


def _name_sizes(axes: Axes, panels: Sequence[Panel], header: str) -> None:
    """K beside the best model's point of each arm that has sizes; all models run as many tokens."""
    measured = [panel for panel in panels if panel.effects]
    for arm in dict.fromkeys(arm for panel in measured for arm in _arms(panel, header)):
        name, (kind, _, size) = f"composed_{header}.{arm}", arm.rpartition("_")
        if kind not in ("selective", "deviation"):
            continue
        points = [panel.effects for panel in measured if f"{name}.correct_rate" in panel.effects]
        best = max(points, key=lambda effects: effects[f"{name}.correct_rate"].estimate)
        place = best[f"{name}.token_share"].estimate, best[f"{name}.correct_rate"].estimate
        axes.annotate(size, place, (6, 4), textcoords="offset points", fontsize=7, color=COLORS["ink"], zorder=5)


def kind_of(name: str) -> str:
    """The method of an arm, its size taken off: `selective` of `selective_8`."""
    return re.sub(r"_\d+$", "", name)


def _headers(panels: Sequence[Panel]) -> list[str]:
    measured = {name.split(".")[0] for panel in panels for name in panel.effects}
    return [header for header in _HEADERS if f"composed_{header}" in measured]


def _arms(panel: Panel, header: str) -> Iterator[str]:
    for name in panel.effects:
        regime, _, rest = name.partition(".")
        arm, _, measured = rest.partition(".")
        if regime == f"composed_{header}" and measured == "recovery" and kind_of(arm) in _ARMS:
            yield arm


def _marker(arm: str) -> str:
    return _ARMS[kind_of(arm)][1]


def _point(arm: str) -> dict[str, Any]:
    return {"ms": 8.0 if _marker(arm) == "*" else 5.5, "alpha": 0.85, "mew": 0, "zorder": 4, "clip_on": False}


def _ends(effect: Effect) -> list[float]:
    low, high = np.clip([effect.low, effect.high], *_LIMITS)
    return [float(low), float(high)]


def _key(panels: Sequence[Panel]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    measured = [panel for panel in panels if panel.effects]
    drawn = {kind_of(name.split(".")[1]) for panel in measured for name in panel.effects if name.count(".") > 1}
    handles: list[Any] = [Patch(color=model_color(panels, panel), lw=0, label=panel.model) for panel in measured]
    handles += [
        Line2D([], [], ls="", marker=marker, color=COLORS["ink"], ms=6, mew=0, label=label)
        for kind, (label, marker) in _ARMS.items()
        if kind in drawn
    ]
    handles.append(Line2D([], [], color=COLORS["ink"], lw=1.6, alpha=0.3, label="interval"))
    handles.append(Line2D([], [], color=COLORS["ink"], lw=0.9, ls=(0, (5, 2)), label="no difference"))
    if any(panel.paper for panel in measured):
        label = "the paper's value (its own denominators)"
        handles.append(Line2D([], [], ls="", marker="D", ms=6.5, mfc="none", mec=COLORS["ink"], label=label))
    return handles
