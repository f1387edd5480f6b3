"""The figure of the unified agent probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.decision_rates import Series, draw_rates, name_arms, rate_key, rates_by_model
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AGENTS = {
    "reprefill": "reprefill",
    "prefix_caching": "prefix caching",
    "prefix_caching_hoist": "prefix caching, hoisted",
    "cacheblend": "CacheBlend",
    "unified_auto": "unified: AUTO",
    "unified_field_only": "unified: field only",
    "unified_erratum": "unified: erratum",
    "unified_field_and_erratum": "unified: field + erratum",
    "unified_full_downstream": "unified: full downstream",
}
_DECISIONS = (
    Series("{arm}.field.correct_rate", "the state has just changed", COLORS["blue"]),
    Series("{arm}.rule.correct_rate", "the rule has just changed", COLORS["vermilion"], "s"),
    Series("{arm}.none.correct_rate", "nothing has just changed", COLORS["grey"], "^"),
    Series("{arm}.correct_rate", "all turns", COLORS["ink"], "D"),
)
_BASELINE = "baseline.majority.correct_rate"
_COSTS = {
    "first.token_ratio": ("first turn", COLORS["orange"], "o"),
    "later.token_ratio": ("later turns", COLORS["green"], "s"),
    "with_compiling.token_ratio": ("whole conversation, compiling included", COLORS["purple"], "^"),
}


def draw_unified_agent(panels: Sequence[Panel]) -> Figure:
    """Right decisions by agent and by what has just changed, and the tokens run; one column for each model."""
    with styled():
        figure, (above, below) = panel_grid(panels, heights=(4.6, 3.2))
        arms = _present(panels)
        for column, panel in enumerate(panels):
            if panel.effects:
                draw_rates(above[column], panel, list(arms), _DECISIONS, "share of right decisions")
                if _BASELINE in panel.effects:
                    line = panel.effects[_BASELINE].estimate
                    above[column].axvline(line, color=COLORS["ink"], lw=0.9, ls=(0, (4, 3)), zorder=1)
                _draw_costs(below[column], panel, list(arms))
        first = first_measured(panels)
        if first is not None:
            name_arms(above[first], arms)
            name_arms(below[first], arms)
            figure.legend(handles=_key(), loc="outside lower center", ncols=2 if len(panels) == 1 else 4)
        figure.suptitle("An agent whose state and policy change: what it decides and what it runs", fontsize=11)
    return figure


def unified_agent_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Right decisions over all turns by agent, all models side by side."""
    labels = {f"{arm}.correct_rate": label for arm, label in _present(panels).items()}
    rates_by_model(axes, panels, labels, "Agents whose state and policy change", "share of right decisions")


def _present(panels: Sequence[Panel]) -> dict[str, str]:
    return {
        arm: label for arm, label in _AGENTS.items() if any(f"{arm}.correct_rate" in panel.effects for panel in panels)
    }


def _draw_costs(axes: Axes, panel: Panel, arms: Sequence[str]) -> None:
    for number, (metric, (_, color, marker)) in enumerate(_COSTS.items()):
        for place, arm in enumerate(arms):
            name, y = f"{arm}.{metric}", place + 0.22 * (number - 1)
            if name in panel.effects:
                effect = panel.effects[name]
                ends = [effect.low, effect.high]
                axes.plot(ends, [y, y], color=color, lw=2.6, alpha=0.4, solid_capstyle="butt")
                axes.plot(effect.estimate, y, marker, color=color, ms=4.8, zorder=4)
    axes.axvline(1, color=COLORS["ink"], lw=0.8, ls="--", zorder=1)
    axes.set_xlim(left=0)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel("tokens run / those of reprefill")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelsize=8)


def _key() -> list[Any]:
    from matplotlib.lines import Line2D

    majority = Line2D([], [], color=COLORS["ink"], lw=0.9, ls=(0, (4, 3)), label="majority answer of a conversation")
    costs = [
        Line2D([], [], marker=marker, ls="", ms=4.8, color=color, label=label)
        for label, color, marker in _COSTS.values()
    ]
    return [*rate_key(_DECISIONS, paper=False), majority, *costs]
