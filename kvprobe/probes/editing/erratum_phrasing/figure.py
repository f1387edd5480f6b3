"""The figure of the erratum_phrasing probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.decision_rates import Series, draw_rates, name_arms, rate_key, rates_by_model
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {
    "none": "no line",
    "minimal": "the value alone",
    "session_line": "the session's line",
    "question": "a question",
    "restatement": "plain restatement",
    "update": "tagged update",
    "override": "tagged, override",
}
_SERIES = (
    Series("erratum.{arm}.new_rate", "line on the stale cache", COLORS["blue"]),
    Series("field_and_erratum.{arm}.new_rate", "field edited in place too", COLORS["vermilion"], "s"),
)


def draw_erratum_phrasing(panels: Sequence[Panel]) -> Figure:
    """Share of decisions for the new value by phrasing; the tokens each line makes the model run stand at the right."""
    with styled():
        figure, (row,) = panel_grid(panels, heights=(3.6,))
        for axes, panel in zip(row, panels, strict=True):
            if not panel.effects:
                continue
            draw_rates(axes, panel, list(_LINES), _SERIES, "decisions for the new value")
            for place, line in enumerate(_LINES):
                tokens = panel.effects[f"erratum.{line}.tokens"].estimate
                axes.annotate(
                    f"{tokens:.0f}",
                    (1.0, place),
                    (10, 0),
                    ("axes fraction", "data"),
                    textcoords="offset points",
                    va="center",
                    fontsize=7.5,
                    color=COLORS["grey"],
                )
        first = first_measured(panels)
        if first is not None:
            name_arms(row[first], _LINES)
            paper = any(panel.paper for panel in panels)
            figure.legend(
                handles=rate_key(_SERIES, paper=paper), loc="outside lower center", ncols=min(4, 1 + len(panels))
            )
        figure.suptitle("How must an erratum be phrased? (grey: tokens run for line and task)", fontsize=11)
    return figure


def erratum_phrasing_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """The same for a line on the stale cache, all models."""
    labels = {f"erratum.{line}.new_rate": label for line, label in _LINES.items()}
    rates_by_model(axes, panels, labels, "Phrasing of an erratum", "share of new decisions")
