"""The figure of the SAE probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.legacy.doses import dose_axis, dose_key, draw_dose, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, panel_grid, styled
from kvprobe.figures.legacy.models import draw_doses_by_model
from kvprobe.figures.panel import Panel
from kvprobe.probes.mechanism.sae.effects import decoding_and_cause

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = {
    "in_sample": ("chosen on the same skeletons", COLORS["sky"]),
    "held_out": ("chosen on other skeletons", COLORS["blue"]),
    "matched": ("matched active features", COLORS["orange"]),
}
_CEILINGS = {
    "full": ("whole residual stream", COLORS["ink"], ":"),
    "features": ("all features", COLORS["green"], "-."),
    "error_term": ("error term alone", COLORS["purple"], "--"),
}
_PLACE_MARKERS = ("o", "^", "s", "v")


def draw_sae(panels: Sequence[Panel]) -> Figure:
    """Recovery by number of clamped features above, decoding against cause below; one column for each model."""
    from matplotlib.lines import Line2D

    with styled():
        figure, (top, bottom) = panel_grid(panels, heights=(2.7, 2.3))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            levels(top[column], 0.0, 1.0)
            for name, (_, color, style) in _CEILINGS.items():
                top[column].axhline(panel.effects[f"{name}.recovery"].estimate, color=color, ls=style, lw=1.3, zorder=2)
            for selection, (_, color) in _CURVES.items():
                draw_dose(top[column], panel, selection, "recovery", color=color)
            dose_axis(top[column], sizes_of(panel, "held_out", "recovery"), "clamped features")
            _draw_table(bottom[column], panel)
        top[0].set_ylabel("recovery of the new decision")
        bottom[0].set_ylabel("recovery by the\nfeature's clamp alone")
        figure.suptitle("Do a few features of a sparse autoencoder carry the conclusion?", fontsize=11)
        handles = dose_key(dict(_CURVES.values()), paper=any(panel.paper for panel in panels))
        handles += [
            Line2D([], [], color=color, ls=style, lw=1.3, label=label) for label, color, style in _CEILINGS.values()
        ]
        places = sorted({int(place) for panel in panels if panel.effects for place in _table(panel)["place"]})
        handles += [
            Line2D(
                [],
                [],
                marker=_PLACE_MARKERS[place % len(_PLACE_MARKERS)],
                ls="",
                ms=4,
                color=COLORS["blue"],
                label=f"at note {place + 1}",
            )
            for place in places
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def sae_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Held-out features (solid) against matched active ones (dashed), all models."""
    levels(axes, 0.0, 1.0)
    draw_doses_by_model(axes, panels, ("held_out", "recovery"), ("matched", "recovery"))
    for panel in (panel for panel in panels if panel.effects):
        dose_axis(axes, sizes_of(panel, "held_out", "recovery"), "clamped features")
    axes.set_ylabel("recovery")
    axes.set_title("SAE features; dashed: matched active")


def _table(panel: Panel) -> pd.DataFrame:
    return decoding_and_cause(panel.rows[panel.rows["measurement"] == "feature"]).reset_index()


def _draw_table(axes: Axes, panel: Panel) -> None:
    for _, units in _table(panel).groupby("place"):
        marker = _PLACE_MARKERS[int(units["place"].iloc[0]) % len(_PLACE_MARKERS)]
        axes.plot(units["auc"], units["recovery"], marker, ls="", ms=4, mew=0, color=COLORS["blue"], alpha=0.6)
    levels(axes, 0.0)
    axes.axvline(0.5, color=COLORS["ink"], lw=0.8, ls=(0, (4, 3)), zorder=1)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("AUC of the feature for the conclusion")
