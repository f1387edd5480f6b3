"""The figure of the transplant probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvprobe.figures.decision_rates import Series, draw_rates, name_arms, rate_key
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel
from kvprobe.probes.composing.transplant.probe import CONDITIONS, FLOORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELS = {
    "full_prefill": "full prefill, in pieces",
    "splice_real": "compiled in its place",
    "splice_neutral": "splice, neutral header",
    "splice_bos": "splice, beginning of text",
    "splice_none": "splice, no header",
    "seam": "splice, {n} tokens repaired",
    "epic": "EPIC",
    "prompt_cache": "Prompt Cache",
    "cacheblend": "CacheBlend, {n}%",
    "relative": "from another prompt",
    "no_rotation": "not rotated",
    "wrong_chunk": "wrong rule",
    "shuffled": "shuffled rule",
    "removed": "no rule",
}
_MAIN = ("splice_real", "splice_neutral", "splice_none", "cacheblend", "no_rotation", "wrong_chunk")
_NAMES = {"self_contained": "rule before the field", "coupled": "field before the rule"}
_LOOKS = {"self_contained": (COLORS["blue"], "o"), "coupled": (COLORS["vermilion"], "s")}
_LEAST_KL = 1e-5
_LEAST_COSINE = 0.7
_ROWS = (
    ("agreement", "decides as the full prefill"),
    ("kl", "divergence from it (nats)"),
    ("cosine", "cosine of logits with it"),
)


def draw_transplant(panels: Sequence[Panel]) -> Figure:
    """Agreement, divergence and cosine of every arm, self-contained and coupled; one column for each model."""
    arms = _arms(panels)
    labels = {arm: _label(arm) for arm in arms}
    with styled():
        figure, grid = panel_grid(panels, heights=(3.6, 3.6, 3.6))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for row, (effect, label) in zip(grid, _ROWS, strict=True):
                _draw_rows(row[column], panel, arms, effect, label)
        first = first_measured(panels)
        if first is not None:
            for row in grid:
                name_arms(row[first], labels)
            paper = any(panel.paper for panel in panels)
            figure.legend(handles=rate_key(_series("agreement"), paper=paper), loc="outside lower center", ncols=4)
        figure.suptitle("Does a prompt composed from a compiled rule decide as its full prefill?", fontsize=11)
    return figure


def transplant_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Agreement with the full prefill where the rule is self-contained and where it is coupled, all models."""
    arms = [arm for arm in _arms(panels) if _kind(arm) in _MAIN]
    known = [f"{condition}.{arm}.agreement" for condition in CONDITIONS for arm in arms]
    draw_by_model(axes, panels, {name: _label(name.split(".")[1]) for name in known}, (0.0, 1.0))
    axes.tick_params(axis="x", labelsize=6.5)
    for label in axes.get_xticklabels():
        label.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.axhline(0.5, color=COLORS["ink"], lw=0.8, ls=(0, (4, 3)), zorder=1)
    axes.axvline(len(arms) - 0.5, color=COLORS["grey"], lw=0.8)
    for number, condition in enumerate(CONDITIONS):
        place = (number + 0.5) * len(arms) - 0.5
        axes.text(place, 1.1, _NAMES[condition], ha="center", va="bottom", fontsize=7.5, color=COLORS["grey"])
    axes.set_xlim(-0.6, len(known) - 0.4)
    axes.set_ylim(-0.05, 1.2)
    axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
    axes.set_ylabel("decides as the full prefill")
    axes.set_title("Composed decisions")


def _draw_rows(axes: Axes, panel: Panel, arms: Sequence[str], effect: str, label: str) -> None:
    draw_rates(axes, _visible(panel) if effect == "kl" else panel, arms, _series(effect), label)
    if effect == "kl":
        axes.set_xscale("log")
        axes.set_xlim(_LEAST_KL / 1.5, 20)
    if effect == "cosine":
        axes.set_xlim(_LEAST_COSINE, 1.01)
    if effect == "agreement":
        axes.axvline(0.5, color=COLORS["ink"], lw=0.9, ls=(0, (4, 3)), zorder=1)
    floors = [place for place, arm in enumerate(arms) if arm in FLOORS]
    if floors:
        axes.axhspan(min(floors) - 0.5, max(floors) + 0.5, color=COLORS["grey"], alpha=0.1, lw=0, zorder=0)


def _visible(panel: Panel) -> Panel:
    """The panel with divergences that are too small for the axis, such as those of the same entries, at its end."""
    shown = {
        name: replace(effect, **{end: max(getattr(effect, end), _LEAST_KL) for end in ("estimate", "low", "high")})
        for name, effect in panel.effects.items()
    }
    return replace(panel, effects=shown)


def _series(effect: str) -> list[Series]:
    return [Series(f"{condition}.{{arm}}.{effect}", _NAMES[condition], *_LOOKS[condition]) for condition in CONDITIONS]


def _arms(panels: Sequence[Panel]) -> list[str]:
    """All measured arms, the ceiling on top and the floors last."""
    found: dict[str, Any] = {
        name.split(".")[1]: None
        for panel in panels
        for name in panel.effects
        if name.split(".")[0] in CONDITIONS and name.endswith(".agreement")
    }
    order = list(_LABELS)
    return sorted(found, key=lambda arm: order.index(_kind(arm)))


def _kind(arm: str) -> str:
    """The arm without its size: `seam_8` is a `seam`."""
    return arm if arm in _LABELS else arm.rpartition("_")[0]


def _label(arm: str) -> str:
    return _LABELS[_kind(arm)].format(n=arm.rpartition("_")[2])
