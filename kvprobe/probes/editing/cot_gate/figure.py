"""The figure of the cot_gate probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.decision_rates import Series, draw_rates, name_arms, rate_key
from kvprobe.figures.legacy.doses import draw_dose, sizes_of
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import draw_doses_by_model
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = {
    "oracle": "full reprefill",
    "stale": "stale",
    "field_only": "field only",
    "erratum": "erratum",
    "field_and_erratum": "field and erratum",
}
_COLORS = {
    "oracle": "green",
    "stale": "grey",
    "field_only": "vermilion",
    "erratum": "blue",
    "field_and_erratum": "purple",
}

# Curves that lie on each other stay visible.
_WIDTHS = {"oracle": 5.0, "stale": 1.5, "field_only": 1.5, "erratum": 3.0, "field_and_erratum": 1.2}


def draw_cot_gate(panels: Sequence[Panel]) -> Figure:
    """Above, decisions directly and after a chain for each arm; below, those forced after k chain tokens."""
    with styled():
        figure, (top, bottom) = panel_grid(panels, heights=(3.0, 2.6))
        series = _series(_prefix(panels))
        for upper, lower, panel in zip(top, bottom, panels, strict=True):
            if panel.effects:
                draw_rates(upper, panel, list(_ARMS), series, "share of decisions")
                _draw_forced(lower, panel)
        first = first_measured(panels)
        if first is not None:
            name_arms(top[first], _ARMS)
            bottom[first].set_ylabel("share of decisions\nfor the new value")
            handles = [*rate_key(series, paper=any(panel.paper for panel in panels)), *_arm_key()]
            figure.legend(handles=handles, loc="outside lower center", ncols=min(3, 1 + len(panels)), fontsize=8)
        where = "\n(a remark in the context states the old conclusion)" if _prefix(panels) else ""
        figure.suptitle(f"Does editing the field alone suffice once the model thinks?{where}", fontsize=11)
    return figure


def cot_gate_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Field-only (solid) and erratum (dashed) against the length of the chain, all models."""
    prefix = _prefix(panels)
    draw_doses_by_model(
        axes,
        panels,
        (f"{prefix}forced.field_only", "new_rate"),
        (f"{prefix}forced.erratum", "new_rate"),
    )
    axes.set_ylim(-0.05, 1.05)
    axes.set_xlabel("chain tokens before the answer")
    axes.set_ylabel("share of new decisions")
    axes.set_title("Field only (solid), erratum (dashed)")


def _series(prefix: str) -> list[Series]:
    series = [
        Series(f"{prefix}direct.{{arm}}.new_rate", "direct: new action", COLORS["blue"], "s"),
        Series(f"{prefix}think.{{arm}}.new_rate", "after a chain: new action", COLORS["vermilion"]),
        Series(f"{prefix}think.{{arm}}.old_rate", "after a chain: old action", COLORS["vermilion"], filled=False),
    ]
    if prefix:
        # The paper gives old actions alone here, directly too.
        old = Series(f"{prefix}direct.{{arm}}.old_rate", "direct: old action", COLORS["blue"], "s", filled=False)
        series.insert(1, old)
    return series


def _arm_key() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], marker="o", ms=3.5, color=COLORS[_COLORS[arm]], lw=_WIDTHS[arm], label=f"{label} (below)")
        for arm, label in _ARMS.items()
    ]


def _prefix(panels: Sequence[Panel]) -> str:
    return "poisoned." if any(name.startswith("poisoned.") for panel in panels for name in panel.effects) else ""


def _draw_forced(axes: Axes, panel: Panel) -> None:
    prefix = _prefix([panel])
    for arm, label in _ARMS.items():
        color, width = COLORS[_COLORS[arm]], _WIDTHS[arm]
        draw_dose(axes, panel, f"{prefix}forced.{arm}", "new_rate", color=color, label=label, lw=width)
    axes.set_ylim(-0.05, 1.05)
    axes.set_xticks(sizes_of(panel, f"{prefix}forced.stale", "new_rate"))
    length = panel.effects["chains.length"].estimate
    axes.set_xlabel(f"chain tokens before a forced answer\n(whole chains: {length:.0f} on average)")
