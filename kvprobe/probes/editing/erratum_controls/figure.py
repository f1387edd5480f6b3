"""The figure of the erratum_controls probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.decision_rates import Series, draw_rates, name_arms, rate_key, rates_by_model
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.panel import Panel
from kvprobe.probes.editing.erratum_controls.probe import EXPECTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "stale": "no line",
    "neutral": "neutral, as long",
    "random": "random, as long",
    "old_value": "old value",
    "irrelevant_field": "irrelevant field",
    "unmentioned_value": "value of no case",
    "new_then_old": "new, then old",
    "old_then_new": "old, then new",
    "irrelevant_then_new": "irrelevant, then new",
    "early_reused": "early, rest reused",
    "early_recomputed": "early, rest rerun",
    "new_value": "new value (erratum)",
}
_SERIES = (Series("{arm}.new_rate", "measured", COLORS["blue"]),)


def draw_erratum_controls(panels: Sequence[Panel]) -> Figure:
    """Share of decisions for the new value by arm, with the half of the axis where the line ought to lead shaded."""
    from matplotlib.patches import Patch

    with styled():
        figure, (row,) = panel_grid(panels, heights=(4.6,))
        for axes, panel in zip(row, panels, strict=True):
            if not panel.effects:
                continue
            draw_rates(axes, panel, list(_ARMS), _SERIES, "decisions for the new value")
            for place, arm in enumerate(_ARMS):
                expected = EXPECTED[arm]
                if expected is not None:
                    left = 0.5 if expected else -0.04
                    axes.fill_between([left, left + 0.54], place - 0.46, place + 0.46, color="#EAF3EA", lw=0, zorder=0)
        first = first_measured(panels)
        if first is not None:
            name_arms(row[first], _ARMS)
            handles = rate_key(_SERIES, paper=any(panel.paper for panel in panels))
            handles.append(Patch(color="#D5E8D5", lw=0, label="where the line ought to lead"))
            figure.legend(handles=handles, loc="outside lower center", ncols=min(4, 1 + len(panels)))
        figure.suptitle("Is it what the erratum says that turns the decision?", fontsize=11)
    return figure


def erratum_controls_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """The same, all models."""
    labels = {f"{arm}.new_rate": label for arm, label in _ARMS.items()}
    rates_by_model(axes, panels, labels, "What the erratum says", "share of new decisions")
