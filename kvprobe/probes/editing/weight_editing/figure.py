"""The figure of the weight-editing probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "rome": "ROME",
    "memit": "MEMIT",
    "memit_together": "MEMIT,\nseveral at once",
    "lora": "LoRA",
    "lora_per_request": "LoRA for its\nrequest alone",
    "field_only": "field only",
    "erratum": "erratum",
    "full_downstream": "full\ndownstream",
}
_SHORT = {
    "rome": "ROME",
    "memit": "MEMIT",
    "lora": "LoRA",
    "lora_per_request": "LoRA\nalone",
    "field_only": "field\nonly",
    "erratum": "erratum",
    "full_downstream": "down-\nstream",
}
_WEIGHTS = 5
_SHARES = {
    "efficacy": ("edited request: new decision", COLORS["blue"], "o"),
    "contamination": ("concurrent requests, old value: flipped", COLORS["vermilion"], "s"),
    "contamination_by_edited_prefix": ("those that read the edited entries", COLORS["orange"], "v"),
    "collateral": ("other skeletons: decision changed", COLORS["purple"], "^"),
}
_PAPER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 9, "mfc": "none", "mew": 1.2, "zorder": 2}


def draw_weight_editing(panels: Sequence[Panel]) -> Figure:
    """Shares of decisions by arm above, latency below; one column for each model."""
    with styled():
        figure, (top, bottom) = panel_grid(panels, heights=(4.6, 3.2))
        for column, panel in enumerate(panels):
            if panel.effects:
                _draw_shares(top[column], panel)
                _draw_latency(bottom[column], panel)
        first = first_measured(panels)
        if first is not None:
            for axes in (top[first], bottom[first]):
                # The rows share their axis, so naming the arms once names them for all columns.
                axes.set_yticks(_places(), [_ARMS[arm] for arm in _ARMS])
            figure.legend(handles=_key(), loc="outside lower center", ncols=2)
        figure.suptitle("Edit the weights or the cache: who else is changed, and what does it cost?", fontsize=11)
    return figure


def weight_editing_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Share of concurrent requests that an edit flips, by arm, all models side by side."""
    draw_by_model(axes, panels, {f"{arm}.contamination": label for arm, label in _SHORT.items()}, (0.0, 1.0))
    axes.axvline(len(_SHORT) - 3.5, color=COLORS["grey"], lw=0.9, zorder=0)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylim(-0.05, 1.05)
    axes.set_ylabel("concurrent requests flipped")
    axes.set_title("Edit the weights or the cache")


def _places() -> list[int]:
    return [len(_ARMS) - 1 - number for number in range(len(_ARMS))]


def _draw_shares(axes: Axes, panel: Panel) -> None:
    step = 0.8 / len(_SHARES)
    for place, arm in zip(_places(), _ARMS, strict=True):
        for number, (name, (_, color, marker)) in enumerate(_SHARES.items()):
            height = place - step * (number - (len(_SHARES) - 1) / 2)
            effect = panel.effects.get(f"{arm}.{name}")
            if effect is not None:
                ends = [max(effect.low, -0.04), min(effect.high, 1.04)]
                axes.plot(ends, [height] * 2, color=color, lw=3.0, alpha=0.35, solid_capstyle="butt")
                axes.plot(effect.estimate, height, marker, color=color, ms=4.5, zorder=3, clip_on=False)
            if f"{arm}.{name}" in panel.paper:
                axes.plot(panel.paper[f"{arm}.{name}"], height, mec=color, clip_on=False, **_PAPER)
        _note_unusable(axes, panel, arm, place)
    _bands(axes)
    axes.set_xlim(-0.04, 1.04)
    count = max((effect.n for name, effect in panel.effects.items() if name.endswith(".efficacy")), default=0)
    axes.set_xlabel(f"share of decisions\n({count} edited requests)")


def _note_unusable(axes: Axes, panel: Panel, arm: str, place: int) -> None:
    """Say why an arm is empty: its validation edits failed."""
    switched, kept = (panel.effects.get(f"{arm}.validation.{name}") for name in ("switched", "kept"))
    if switched is None or kept is None or f"{arm}.efficacy" in panel.effects:
        return
    text = (
        f"not usable: {switched.estimate:.0%} of {switched.n} validation edits\n"
        f"switch, {kept.estimate:.0%} of {kept.n} neighbours stay"
    )
    # Above the place of the last share, where the paper may have a value.
    axes.text(0.5, place + 0.2, text, ha="center", va="center", fontsize=6.5, color=COLORS["grey"])


def _draw_latency(axes: Axes, panel: Panel) -> None:
    for place, arm in zip(_places(), _ARMS, strict=True):
        effect = panel.effects.get(f"{arm}.latency")
        if effect is not None:
            axes.plot([effect.low, effect.high], [place] * 2, color=COLORS["ink"], lw=3.5, alpha=0.3)
            axes.plot(effect.estimate, place, "o", color=COLORS["ink"], ms=4.5, zorder=3)
    axes.set_xscale("log")
    axes.axvline(1.0, color=COLORS["grey"], lw=1.0, ls="--", zorder=1)
    _bands(axes)
    axes.set_xlabel("time until the request can be decided,\nin full reprefills (log scale)")


def _bands(axes: Axes) -> None:
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    for edge in range(len(_ARMS) - 1):
        weights_end = edge == len(_ARMS) - 1 - _WEIGHTS
        axes.axhline(edge + 0.5, color=COLORS["grey"] if weights_end else "#E3E3E3", lw=0.9, zorder=0)
    axes.set_ylim(-0.55, len(_ARMS) - 0.45)
    axes.tick_params(axis="y", length=0, labelsize=8)


def _key() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [_handle(label, color, marker) for label, color, marker in _SHARES.values()]
    paper = Line2D([], [], mec=COLORS["ink"], label="the paper's value", **_PAPER)
    return [*handles, Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="interval"), paper]


def _handle(label: str, color: str, marker: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=marker, ls="", ms=4.5, color=color, label=label)
