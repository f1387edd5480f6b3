"""The figure of the timing probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import COLORS, draw_profile, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOTE = ("at the note (the rule's cases)", COLORS["blue"], "o")
_DECISION = ("at the decision token", COLORS["orange"], "^")
# For each row of the figure what is drawn, and the score that means nothing.
_ROWS: Sequence[tuple[Mapping[str, tuple[str, str, str]], float]] = (
    ({"probe_note": _NOTE, "probe_decision": _DECISION}, 0.5),
    ({"patch_note": _NOTE, "patch_decision": _DECISION}, 0.0),
    (
        {
            "lens_decision": ("logit lens at the decision", COLORS["vermilion"], "s"),
            "tuned_decision": ("tuned lens at the decision", COLORS["purple"], "v"),
        },
        0.5,
    ),
)
_SHORT = {
    "probe_note.onset": "probe,\nnote",
    "probe_decision.onset": "probe,\ndecision",
    "patch_note.onset": "patch,\nnote",
    "patch_decision.onset": "patch,\ndecision",
    "lens_decision.commit": "lens,\ncommit",
}


def draw_timing(panels: Sequence[Panel]) -> Figure:
    """Probe, patch and lens by depth; one column for each model."""
    with styled():
        figure, rows = panel_grid(panels, heights=(1.7, 1.7, 1.7))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            scores = _scores(panel.rows)
            for row, (lines, nothing) in zip(rows, _ROWS, strict=True):
                levels(row[column], nothing, 1.0)
                draw_profile(
                    row[column],
                    {label: (scores[name], color, marker) for name, (label, color, marker) in lines.items()},
                )
                row[column].set_xlabel("blocks run")
                _mark_onsets(row[column], panel, lines, blocks=int(panel.rows["layer"].max()))
        rows[0][0].set_ylabel("probe accuracy,\nother skeletons")
        rows[1][0].set_ylabel("recovery by the\ndonor's residual")
        rows[2][0].set_ylabel("prompts that the\nlens reads rightly")
        figure.suptitle(
            "At which depth is the conclusion in the note, and at which in the decision token?", fontsize=11
        )
        measured = first_measured(panels)
        if measured is not None:
            from matplotlib.lines import Line2D

            onset = Line2D([], [], color=COLORS["ink"], lw=1.0, ls=":", label="onset")
            handles = [handle for row in rows[1:] for handle in row[measured].get_legend_handles_labels()[0]]
            figure.legend(handles=[*handles, onset], loc="outside lower center", ncols=3)
    return figure


def timing_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Onsets of probe and patch at both places and the lens's commit, all models side by side."""
    levels(axes, 1.0)
    draw_by_model(axes, panels, _SHORT)
    axes.set_ylim(0, 1.25)
    axes.set_ylabel("onset (share of depth)")
    axes.set_title("Onset of the conclusion (above 1: never)")


def _mark_onsets(axes: Axes, panel: Panel, lines: Mapping[str, tuple[str, str, str]], blocks: int) -> None:
    """An upright line at each onset that the model reaches."""
    for name, (_, color, _) in lines.items():
        onset = panel.effects[f"{name}.onset"].estimate
        if onset <= 1:
            axes.axvline(onset * blocks, color=color, lw=1.0, ls=":", zorder=2)


def _scores(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """By instrument and place the score by layer: a share of the gap for patches, of right prompts for the others."""
    named = rows.assign(name=rows["measurement"] + "_" + rows["place"])
    scores = {}
    for name in named["name"].unique():
        part = named[named["name"] == name]
        if name.startswith("patch"):
            sums = part.assign(shift=part["margin"] - part["m_base"], gap=part["m_donor"] - part["m_base"])
            totals = sums.groupby("layer")[["shift", "gap"]].sum()
            scores[name] = totals["shift"] / totals["gap"]
        else:
            right = part[["right_base", "right_donor"]].astype(float).mean(axis=1)
            scores[name] = right.groupby(part["layer"]).mean()
    return scores
