"""The figure of the erratum_security probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.decision_rates import Series, draw_rates, name_arms, rate_key, rates_by_model
from kvprobe.figures.legacy.figures import COLORS, first_measured, panel_grid, styled
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMS = {"claim": "claim", "quoted": "quoted erratum", "spoken": "spoken erratum", "own_line": "erratum, own line"}
_PLACES = {"in_turn": "in the request", "last_turn": "last turn"}
_FORGERIES = {
    f"{place}.{form}": f"{form_label},\n{place_label}"
    for form, form_label in _FORMS.items()
    for place, place_label in _PLACES.items()
}
_EDITS = {
    "legitimate.erratum": "erratum",
    "legitimate.full_downstream": "KV-only edit",
    "contested.erratum": "erratum,\nold value forged",
    "contested.full_downstream": "KV-only edit,\nold value forged",
}
_DEFENCES = {
    "none": ("no defence", COLORS["vermilion"], "o"),
    "hidden": ("user's text hidden", COLORS["blue"], "s"),
    "operator_last": ("operator's line last", COLORS["green"], "^"),
}


def draw_erratum_security(panels: Sequence[Panel]) -> Figure:
    """Above, false overrides by forgery and defence; below, what becomes of the operator's own edits."""
    attacks = [Series(f"{name}.{{arm}}.override_rate", *style) for name, style in _DEFENCES.items()]
    edits = [Series(f"{{arm}}.{name}.new_rate", *_DEFENCES[name]) for name in ("none", "hidden")]
    with styled():
        figure, (top, bottom) = panel_grid(panels, heights=(4.6, 2.4))
        for upper, lower, panel in zip(top, bottom, panels, strict=True):
            if panel.effects:
                draw_rates(upper, panel, list(_FORGERIES), attacks, "false overrides of the true field")
                draw_rates(lower, panel, list(_EDITS), edits, "operator's edits that are followed")
        first = first_measured(panels)
        if first is not None:
            name_arms(top[first], _FORGERIES)
            name_arms(bottom[first], _EDITS)
            figure.legend(
                handles=rate_key(attacks, paper=False), loc="outside lower center", ncols=min(4, 1 + len(panels))
            )
        figure.suptitle("Can the user's text forge an erratum, and what stops it?", fontsize=11)
    return figure


def erratum_security_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """False overrides over all forgeries by defence, all models."""
    labels = {f"{name}.override_rate": label for name, (label, _, _) in _DEFENCES.items()}
    rates_by_model(axes, panels, labels, "Forged errata", "false overrides")
