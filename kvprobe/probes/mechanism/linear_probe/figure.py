"""The figure of the linear probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {
    ("conclusion", "first_case"): ("conclusion, end of the first case", COLORS["sky"], "s"),
    ("conclusion", "rule"): ("conclusion, end of the rule", COLORS["blue"], "o"),
    ("conclusion", "task"): ("conclusion, end of the task", COLORS["green"], "v"),
    ("conclusion", "decision"): ("conclusion, decision token", COLORS["vermilion"], "^"),
    ("other_xor", "rule"): ("other exclusive or, end of the rule", COLORS["grey"], "x"),
}
_GRADES = {
    "conclusion.rule.pair.accuracy": ("pairs", COLORS["grey"]),
    "conclusion.rule.accuracy": ("skeletons", COLORS["blue"]),
    "conclusion.rule.vocabulary.accuracy": ("words", COLORS["blue"]),
    "conclusion.rule.wording.accuracy": ("wordings", COLORS["blue"]),
    "conclusion.rule.field.accuracy": ("value", COLORS["blue"]),
}
_ARMS = {
    "readout.stale.says_new": ("stale", COLORS["grey"]),
    "readout.in_place.says_new": ("edited\nin place", COLORS["vermilion"]),
    "readout.erratum.says_new": ("erratum", COLORS["green"]),
    "readout.full.says_new": ("recom-\nputed", COLORS["blue"]),
}
_SHORT = {
    "conclusion.rule.accuracy": "end of\nthe rule",
    "other_xor.rule.accuracy": "other\nXOR there",
    "shuffled.rule.accuracy": "shuffled\nlabels",
    "conclusion.decision.accuracy": "decision\ntoken",
}


def draw_linear_probe(panels: Sequence[Panel]) -> Figure:
    """Accuracy by layer, by what is new in the tested prompts, and what the probe says of edited caches."""
    with styled():
        figure, rows = panel_grid(panels, heights=(2.2, 1.7, 1.7))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for axes in (row[column] for row in rows):
                levels(axes, 0.5)
            draw_profile(rows[0][column], _profiles(panel.rows))
            rows[0][column].set_xlabel("blocks run")
            draw_effects(rows[1][column], panel, _GRADES, {})
            draw_effects(rows[2][column], panel, _ARMS, {})
            for axes in (rows[1][column], rows[2][column]):
                axes.tick_params(axis="x", labelsize=7.5)
        rows[0][0].set_ylabel("accuracy on\nother skeletons")
        rows[1][0].set_ylabel("accuracy where\nthese are new")
        rows[2][0].set_ylabel("decision token\nreads as new")
        for row, lowest in zip(rows, (0.4, 0.4, 0.0), strict=True):
            row[0].set_ylim(lowest, 1.03)
        figure.suptitle('Linear probes of "the first case fires": chance is 0.5', fontsize=11)
        measured = first_measured(panels)
        if measured is not None:
            lines = rows[0][measured].get_legend_handles_labels()[0]
            key = [handle for handle in effect_key("") if handle.get_label()]
            figure.legend(handles=[*lines, *key], loc="outside lower center", ncols=3)
    return figure


def linear_probe_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Accuracy on other skeletons at the notes and at the decision token, all models side by side."""
    levels(axes, 0.5, 1.0)
    draw_by_model(axes, panels, _SHORT)
    axes.set_ylim(0.3, 1.05)
    axes.set_ylabel("accuracy")
    axes.set_title("Linear probes of the conclusion")


def _profiles(rows: pd.DataFrame) -> Mapping[str, tuple[pd.Series, str, str]]:
    probes = rows[(rows["measurement"] == "probe") & (rows["split"] == "skeleton")]
    right = probes.assign(right=probes[["right_base", "right_donor"]].astype(float).mean(axis=1))
    means = right.groupby(["target", "place", "layer"])["right"].mean()
    known = set(zip(probes["target"], probes["place"], strict=True))
    return {label: (means[key], color, marker) for key, (label, color, marker) in _LINES.items() if key in known}
