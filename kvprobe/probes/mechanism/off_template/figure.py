"""The figure of the off-template probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import COLORS, draw_effects, effect_key, panel_grid, recovery_by_skeleton, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INTERVENTIONS = {
    "field_only": ("field\nonly", COLORS["vermilion"]),
    "suffix_10": ("last\n10%", COLORS["blue"]),
    "suffix_50": ("last\n50%", COLORS["blue"]),
    "full_downstream": ("all", COLORS["grey"]),
}
_TEMPLATES = {
    "two_hop": "a two-hop question",
    "conversation": "free conversation",
    "lookup": "an attribute lookup",
    "own": "own prompts",
}


def draw_off_template(panels: Sequence[Panel]) -> Figure:
    """Recovery by what was transplanted; one row for each template, one column for each model."""
    templates = _templates(panels)
    with styled():
        figure, rows = panel_grid(panels, heights=[2.7] * max(1, len(templates)))
        for axes, template in zip(rows, templates, strict=False):
            for column, panel in enumerate(panels):
                if panel.effects:
                    _draw_template(axes[column], panel, template)
            axes[0].set_ylabel("recovery of the new decision")
        titles = ", ".join(_TEMPLATES[template] for template in templates) or "other templates"
        figure.suptitle(f"Which entries carry the effect on {titles}?", fontsize=11)
        if templates:
            figure.legend(handles=effect_key("one skeleton"), loc="outside lower center", ncols=4)
    return figure


def off_template_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Recovery by what was transplanted, all models and templates side by side."""
    levels(axes, 0.0, 1.0)
    measured = [(panel, template) for panel in panels for template in _templates([panel])]
    step = 0.7 / max(1, len(measured))
    for number, (panel, template) in enumerate(measured):
        shift = step * (number - (len(measured) - 1) / 2)
        names = [f"{template}.{intervention}.recovery" for intervention in _INTERVENTIONS]
        known = [(place + shift, panel.effects[name]) for place, name in enumerate(names) if name in panel.effects]
        # An unbounded end must not stretch the axis.
        errors = [
            [effect.estimate - max(effect.low, -1.0) for _, effect in known],
            [min(effect.high, 2.0) - effect.estimate for _, effect in known],
        ]
        axes.errorbar(
            [place for place, _ in known],
            [effect.estimate for _, effect in known],
            yerr=errors,
            fmt="o",
            ms=4,
            lw=1.2,
            color=model_color(panels, panel),
            label=panel.model,
        )
    axes.set_xticks(range(len(_INTERVENTIONS)), [label for label, _ in _INTERVENTIONS.values()])
    axes.set_ylabel("recovery")
    templates = ", ".join(_TEMPLATES[template] for template in _templates(panels))
    axes.set_title(f"Off template: {templates}" if templates else "Off template")


def _templates(panels: Sequence[Panel]) -> list[str]:
    found = {str(name).split(".")[0] for panel in panels for name in panel.effects}
    return [template for template in _TEMPLATES if template in found]


def _draw_template(axes: Axes, panel: Panel, template: str) -> None:
    levels(axes, 0.0, 1.0)
    effects = {
        f"{template}.{intervention}.recovery": style
        for intervention, style in _INTERVENTIONS.items()
        if f"{template}.{intervention}.recovery" in panel.effects
    }
    rows = panel.rows[panel.rows["template"] == template]
    draw_effects(axes, panel, effects, {name: _by_skeleton(rows, name.split(".")[1]) for name in effects})


def _by_skeleton(rows: pd.DataFrame, intervention: str) -> pd.Series:
    part = rows[rows["intervention"] == intervention]
    return recovery_by_skeleton(part)
