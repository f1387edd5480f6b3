"""The figure of the AUTO probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel
from kvprobe.stats import Effect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POLICIES = {
    "always_stale": ("always stale", COLORS["grey"], "o"),
    "always_field_only": ("always field only", COLORS["sky"], "s"),
    "always_selective_4": ("always field and 4 tokens", COLORS["orange"], "v"),
    "always_erratum": ("always an erratum", COLORS["vermilion"], "^"),
    "field_and_erratum": ("always field and erratum", COLORS["purple"], "P"),
    "if_mentioned": ("erratum if named later", COLORS["green"], "X"),
    "cheapest_right": ("cheapest that is right (bound)", COLORS["ink"], "*"),
    "auto": ("AUTO", COLORS["blue"], "D"),
}


def draw_auto(panels: Sequence[Panel]) -> Figure:
    """Error rate against the share of tokens run: constant policies, the bound, and AUTO as errors cost more."""
    with styled():
        figure, (row,) = panel_grid(panels, heights=(3.2,))
        for axes, panel in zip(row, panels, strict=True):
            if not panel.effects:
                continue
            curve = _curve(panel)
            axes.plot([c.estimate for c, _ in curve], [e.estimate for _, e in curve], "-", color=COLORS["blue"], lw=1)
            for name, (_, color, marker) in _POLICIES.items():
                _point(axes, panel, name, color=color, marker=marker)
            _axes(axes)
        first = first_measured(panels)
        if first is not None:
            row[first].set_ylabel("decisions unlike a full reprefill")
        figure.legend(handles=_key(), loc="outside lower center", ncols=4 if len(panels) > 1 else 2)
        figure.suptitle("Which edit suffices? Choosing before paying", fontsize=11)
    return figure


def auto_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """AUTO (filled) against always an erratum (open), all models, a line joining the two."""
    for panel in (panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        ends = [_of(panel, name) for name in ("always_erratum", "auto")]
        axes.plot([c.estimate for c, _ in ends], [e.estimate for _, e in ends], "-", color=color, lw=0.8, alpha=0.6)
        _point(axes, panel, "always_erratum", color=color, marker="^", mfc="white")
        _point(axes, panel, "auto", color=color, marker="D")
    _axes(axes)
    axes.set_ylabel("error rate")
    axes.set_title("AUTO (filled) and always an erratum (open)")


def _of(panel: Panel, name: str) -> tuple[Effect, Effect]:
    return panel.effects[f"{name}.token_share"], panel.effects[f"{name}.error_rate"]


def _curve(panel: Panel) -> list[tuple[Effect, Effect]]:
    """AUTO at every error cost, the cheapest errors first."""
    names = [
        name.removesuffix(".loss") for name in panel.effects if name.startswith("auto_") and name.endswith(".loss")
    ]
    costs = {name: float(name.removeprefix("auto_")) for name in names if name != "auto_less_erratum"}
    return [_of(panel, name) for name in sorted(costs, key=costs.__getitem__)]


def _point(axes: Axes, panel: Panel, name: str, **style: Any) -> None:
    cost, error = _of(panel, name)
    errors = [[error.estimate - error.low], [error.high - error.estimate]]
    axes.errorbar(cost.estimate, error.estimate, yerr=errors, ms=6, lw=1, clip_on=False, zorder=3, **style)


def _axes(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.0)
    axes.set_xlim(left=-0.02)
    axes.set_xlabel("tokens run (share of a prefill)")


def _key() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], ls="-" if name == "auto" else "", marker=marker, color=color, ms=6, label=label)
        for name, (label, color, marker) in _POLICIES.items()
    ]
