"""The figure of the field-position probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvprobe.figures.legacy.doses import levels
from kvprobe.figures.legacy.figures import COLORS, draw_effects, effect_key, panel_grid, recovery_by_skeleton, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel
from kvprobe.probes.mechanism.field_position.probe import SLOTS, cell_name
from kvprobe.stats import Effect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Cell = tuple[str, int, int]
_SLOT_LABELS = {
    "start": "before rule",
    "after_policy": "after rule",
    "after_filler": "after notes",
    "end": "at the end",
}
_PALETTE = tuple(COLORS[name] for name in ("vermilion", "blue", "green", "orange", "purple", "sky"))


def draw_field_position(panels: Sequence[Panel]) -> Figure:
    """Field-only recovery by cell above, the suffix dose by cell below; one column for each model."""
    colors = dict(zip(_cells(panels), cycle(_PALETTE), strict=False))
    with styled():
        figure, (top, bottom) = panel_grid(panels, heights=(2.6, 2.1))
        for column, panel in enumerate(panels):
            if panel.effects:
                _draw_field_only(top[column], panel, colors)
                _draw_dose(bottom[column], panel, colors)
        top[0].set_ylabel("recovery,\nfield alone")
        bottom[0].set_ylabel("recovery,\nlast part of the prompt")
        figure.suptitle("Does a field act for itself when it is near, or named again?", fontsize=11)
        if colors:
            figure.legend(handles=effect_key("one skeleton"), loc="outside lower center", ncols=4)
    return figure


def field_position_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Field-only recovery over the mean distance from field to decision, all models."""
    levels(axes, 0.0, 1.0)
    for number, panel in enumerate(panel for panel in panels if panel.effects):
        color = model_color(panels, panel)
        points = [(_distance(panel.rows, cell), _field_only(panel, cell)) for cell in _cells([panel])]
        points.sort(key=lambda point: point[0])
        # Dodged, since all models have the same distances.
        distances = [distance * 1.03**number for distance, _ in points]
        effects = [effect for _, effect in points]
        errors = [[e.estimate - max(e.low, -0.5) for e in effects], [min(e.high, 1.5) - e.estimate for e in effects]]
        estimates = [e.estimate for e in effects]
        axes.errorbar(distances, estimates, yerr=errors, fmt="o", ms=4, lw=1.2, color=color, label=panel.model)
    axes.set_xlabel("tokens from field to decision")
    axes.set_ylabel("recovery, field alone")
    axes.set_title("Field alone, by distance and mentions")


def _draw_field_only(axes: Axes, panel: Panel, colors: dict[_Cell, str]) -> None:
    levels(axes, 0.0, 1.0)
    names = {f"{cell_name(*cell)}.field_only.recovery": cell for cell in _cells([panel])}
    styles = {name: (_label(cell, list(colors)), colors[cell]) for name, cell in names.items()}
    dots = {name: _by_skeleton(_rows_of(panel.rows, cell)) for name, cell in names.items()}
    # The paper has one value for a slot, which stands beside the slot's first cell.
    first = {cell[0]: name for name, cell in reversed(names.items())}
    paper = {
        name: panel.paper[f"{slot}.field_only.recovery"]
        for slot, name in first.items()
        if f"{slot}.field_only.recovery" in panel.paper
    }
    draw_effects(axes, replace(panel, paper=paper), styles, dots)
    axes.tick_params(axis="x", labelsize=7)


def _draw_dose(axes: Axes, panel: Panel, colors: dict[_Cell, str]) -> None:
    levels(axes, 0.0, 1.0)
    for cell in _cells([panel]):
        doses = _doses(panel, cell)
        fractions = [100 * fraction for fraction in doses]
        effects = list(doses.values())
        low = np.clip([effect.low for effect in effects], -0.5, 1.5)
        high = np.clip([effect.high for effect in effects], -0.5, 1.5)
        axes.fill_between(fractions, low, high, color=colors[cell], alpha=0.15, lw=0)
        style: dict[str, Any] = {"color": colors[cell], "marker": "o", "ms": 3, "lw": 1.3, "clip_on": False}
        axes.plot(fractions, [effect.estimate for effect in effects], **style)
    axes.set_xlabel("last % from field to decision")


def _doses(panel: Panel, cell: _Cell) -> dict[float, Effect]:
    rows = _rows_of(panel.rows, cell)
    rows = rows[rows["intervention"] != "field_only"]
    fractions = rows.groupby("intervention")["fraction"].first().sort_values()
    return {fraction: panel.effects[f"{cell_name(*cell)}.{name}.recovery"] for name, fraction in fractions.items()}


def _cells(panels: Sequence[Panel]) -> list[_Cell]:
    found = {
        (str(slot), int(notes), int(mentions))
        for panel in panels
        if panel.effects
        for slot, notes, mentions in panel.rows[["slot", "notes", "mentions"]].drop_duplicates().to_numpy()
    }
    return sorted(found, key=lambda cell: (SLOTS.index(cell[0]), *cell[1:]))


def _rows_of(rows: pd.DataFrame, cell: _Cell) -> pd.DataFrame:
    return rows[(rows["slot"] == cell[0]) & (rows["notes"] == cell[1]) & (rows["mentions"] == cell[2])]


def _distance(rows: pd.DataFrame, cell: _Cell) -> float:
    return float(_rows_of(rows, cell)["distance"].mean())


def _field_only(panel: Panel, cell: _Cell) -> Effect:
    return panel.effects[f"{cell_name(*cell)}.field_only.recovery"]


def _label(cell: _Cell, cells: Sequence[_Cell]) -> str:
    """What tells a cell from the others."""
    parts = (_SLOT_LABELS[cell[0]], f"{cell[1]} notes", f"{cell[2]} named")
    varied = [part for place, part in enumerate(parts) if len({other[place] for other in cells}) > 1]
    return "\n".join(varied or parts[:1])


def _by_skeleton(rows: pd.DataFrame) -> pd.Series:
    part = rows[rows["intervention"] == "field_only"]
    return recovery_by_skeleton(part)
