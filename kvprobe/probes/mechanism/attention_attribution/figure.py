"""The figure of the attention attribution probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import (
    COLORS,
    draw_effects,
    draw_profile,
    effect_key,
    first_measured,
    panel_grid,
    styled,
)
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MASSES = {
    "mass.sink": ("sink", COLORS["grey"]),
    "mass.field": ("field", COLORS["vermilion"]),
    "mass.policy": ("rule", COLORS["green"]),
    "mass.task": ("task", COLORS["purple"]),
    "mass.downstream": ("all after\nthe field", COLORS["blue"]),
}
_LINES = {
    "sink": ("sink", COLORS["grey"], "s"),
    "field": ("field", COLORS["vermilion"], "o"),
    "policy": ("rule", COLORS["green"], "^"),
    "task": ("task", COLORS["purple"], "v"),
    "self": ("itself", COLORS["orange"], "D"),
}
_KINDS = {"rule": COLORS["green"], "task": COLORS["purple"], "other": COLORS["sky"]}


def draw_attention_attribution(panels: Sequence[Panel]) -> Figure:
    """Mass by region, mass by layer, and attention against causal effect; one column for each model."""
    from matplotlib.lines import Line2D

    with styled():
        figure, (masses, layers, causes) = panel_grid(panels, heights=(2.2, 1.9, 2.2))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            rows = panel.rows[panel.rows["measurement"] == "mass"]
            rows = rows[rows["cache"] == "field_only"]
            draw_effects(masses[column], panel, _MASSES, {name: _by_skeleton(rows, name) for name in _MASSES})
            draw_profile(layers[column], _profiles(rows))
            _draw_causes(causes[column], panel)
        masses[0].set_ylabel("attention mass of\nthe decision token")
        layers[0].set_ylabel("attention mass")
        causes[0].set_ylabel("recovery when\ntransplanted alone")
        figure.suptitle("Where does the decision look, and does it act from there?", fontsize=11)
        measured = first_measured(panels)
        if measured is not None:
            lines = layers[measured].get_legend_handles_labels()[0]
            other = Line2D([], [], marker="o", ls="", ms=4, mew=0, color=_KINDS["other"], label="other position")
            handles = [*effect_key("one skeleton"), *lines, other]
            figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def attention_attribution_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Attention mass by region on the field-only cache, all models."""
    measured = [panel for panel in panels if panel.effects]
    width = 0.8 / max(1, len(measured))
    for number, panel in enumerate(measured):
        color = model_color(panels, panel)
        for place, name in enumerate(_MASSES):
            if name not in panel.effects:
                continue
            effect, x = panel.effects[name], place + (number - (len(measured) - 1) / 2) * width
            axes.bar(x, effect.estimate, 0.9 * width, color=color, label=None if place else panel.model, zorder=2)
            axes.plot([x, x], [effect.low, effect.high], color=COLORS["ink"], lw=1.0, zorder=3)
            if name in panel.paper:
                axes.plot(x, panel.paper[name], "D", ms=4, mfc="white", mec=COLORS["ink"], mew=1.0, zorder=4)
    axes.set_xticks(range(len(_MASSES)), [label for label, _ in _MASSES.values()])
    axes.set_ylabel("attention mass")
    axes.set_title("Where the decision token looks")


def _by_skeleton(rows: pd.DataFrame, effect: str) -> pd.Series:
    region = effect.removeprefix("mass.")
    inside = rows["downstream"].astype(bool) if region == "downstream" else rows["region"] == region
    sums = rows[inside].groupby(["skeleton", "pair"])["mass"].sum() / rows["layer"].nunique()
    return sums.groupby("skeleton").mean()


def _profiles(rows: pd.DataFrame) -> dict[str, tuple[pd.Series, str, str]]:
    means = rows.groupby(["region", "layer"])["mass"].mean()
    present = set(means.index.get_level_values("region"))
    return {
        label: (means[region], color, marker) for region, (label, color, marker) in _LINES.items() if region in present
    }


def _draw_causes(axes: Axes, panel: Panel) -> None:
    rows = panel.rows[panel.rows["measurement"] == "position"]
    recovery = (rows["margin_transplanted"] - rows["m_base"]) / (rows["m_donor"] - rows["m_base"])
    kind = rows["segment"].where(rows["segment"].isin(["policy", "task"]), "other").replace("policy", "rule")
    levels(axes, 0.0)
    for name, color in _KINDS.items():
        part = kind == name
        attention = np.maximum(rows.loc[part, "attention"], 1e-6)
        axes.plot(attention, recovery[part].clip(-0.5, 1.5), "o", ms=2.5, mew=0, alpha=0.35, color=color)
    axes.set_xscale("log")
    axes.set_xlabel("attention paid to one position")
    correlation = panel.effects.get("transplanted.correlation")
    if correlation is not None:
        text = f"rank correlation {correlation.estimate:.2f}\n[{correlation.low:.2f}, {correlation.high:.2f}]"
        axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=7.5)
