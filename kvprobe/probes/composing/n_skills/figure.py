"""The figure of the n_skills probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.legacy.doses import dose_axis, draw_dose, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_doses_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "full_prefill": ("full prefill", COLORS["ink"], "X"),
    "splice_none": ("splice, no header", COLORS["vermilion"], "o"),
    "splice_neutral": ("splice, neutral header", COLORS["blue"], "s"),
    "removed": ("deciding skill removed", COLORS["grey"], "v"),
}
_ROWS = (
    ("agreement", "decides as the\nfull prefill"),
    ("accuracy", "right decisions"),
    ("cosine", "cosine of logits"),
    ("token_share", "tokens run (share\nof a full prefill)"),
)
_AXIS = "skills in the prompt"


def draw_n_skills(panels: Sequence[Panel]) -> Figure:
    """Agreement, right decisions, cosine and tokens over the number of skills; one column for each model."""
    with styled():
        figure, grid = panel_grid(panels, heights=(1.9,) * len(_ROWS))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for row, (metric, _) in zip(grid, _ROWS, strict=True):
                for arm, (_, color, marker) in _ARMS.items():
                    draw_dose(row[column], panel, arm, metric, color=color, marker=marker)
                dose_axis(row[column], sizes_of(panel, "full_prefill", "accuracy"), _AXIS)
                row[column].set_ylim(-0.05, 1.08)
            levels(grid[0][column], 0.5, 1.0)
            levels(grid[1][column], 0.5, 1.0)
        first = first_measured(panels)
        if first is not None:
            for row, (_, label) in zip(grid, _ROWS, strict=True):
                row[first].set_ylabel(label)
            figure.legend(
                handles=_key(paper=any(panel.paper for panel in panels)),
                loc="outside lower center",
                ncols=3 if len(panels) > 1 else 2,
            )
        figure.suptitle("Several skills, each compiled alone", fontsize=11)
    return figure


def n_skills_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Agreement of spliced skills (solid) and without the deciding one (dashed) over their number, all models."""
    draw_doses_by_model(axes, panels, ("splice_neutral", "agreement"), ("removed", "agreement"))
    counts = sorted({size for panel in panels for size in sizes_of(panel, "splice_neutral", "agreement")})
    if counts:
        dose_axis(axes, counts, _AXIS)
    axes.set_ylim(-0.05, 1.08)
    axes.set_ylabel("decides as a prefill")
    axes.set_title("N skills spliced (solid), asked one removed (dashed)")


def _key(*, paper: bool) -> list[object]:
    from matplotlib.lines import Line2D

    handles: list[object] = [
        Line2D([], [], marker=marker, ms=4, color=color, label=label) for label, color, marker in _ARMS.values()
    ]
    if paper:
        ink = COLORS["ink"]
        handles.append(
            Line2D([], [], marker="D", ls="", ms=5, mfc="white", mec=ink, mew=1.2, label="the paper's value")
        )
    return handles
