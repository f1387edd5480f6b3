"""What the rows of `field_position` mean: field-only recovery and suffix doses by cell, and the effect of each factor.

`X` in an effect's name is a slot (`start`, pooled over its cells) or a cell (`start.notes_4.mentions_0`):

    X.field_only.recovery   the field's own entries
    X.suffix_20.recovery    the last 20% of the entries from the field to the decision, and so on
    X.suffix_for_80         the smallest suffix that recovers 0.8
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from kvprobe.figures.bars import Bars, effect_key
from kvprobe.figures.by_model import model_color, model_marker
from kvprobe.figures.doses import Curve, Doses
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS, levels
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.doses import dose_effects, dose_names, recoveries, smallest_suffixes
from kvprobe.probes.mechanism.field_position.probe import SLOTS, FieldPositionProbe
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELL = "{slot}.notes_{notes}.mentions_{mentions}"
FACTORS = {"distance": "notes", "mentions": "mentions", "slot": "slot_order"}
"""The column of rows that holds the levels of each factor."""
_PAPER_SLOTS = {
    "start": "pos0:early(before gate)",
    "after_policy": "pos1:after gate",
    "after_filler": "pos2:after filler",
    "end": "pos4:hoisted(before decision)",
}
_SLOT_LABELS = {
    "start": "before rule",
    "after_policy": "after rule",
    "after_filler": "after notes",
    "end": "at the end",
}
_PALETTE = tuple(COLORS[name] for name in ("vermilion", "blue", "green", "orange", "purple", "sky"))


def effects(sample: Sample, _: FieldPositionProbe) -> Iterator[Effect]:
    """Field-only recovery and suffix dose by slot and by cell, the factors' effects, windows, noise."""
    for _, part in sample.by("slot"):
        yield from dose_effects(part, "{slot}")
    for _, _, _, part in sample.by("slot", "notes", "mentions"):
        yield from dose_effects(part, CELL)
    for factor in FACTORS:
        yield from factor_effects(sample, factor)
    for inside, part in sample.of(intervention="field_only").measured("window").by("inside_window"):
        yield part.recovery(f"{'inside' if inside else 'outside'}_window.field_only.recovery")
    if len(sample):
        yield sample.noise()


def names(probe: FieldPositionProbe) -> Iterator[str]:
    """Those of `effects`."""
    groups = [*SLOTS, *(f"{slot}.notes_{{notes}}.mentions_{{mentions}}" for slot in SLOTS)]
    yield from dose_names(groups, probe.fractions)
    yield from joined(FACTORS, ("field_only_difference", "suffix_for_80_difference"))
    yield from joined(("inside_window", "outside_window"), "field_only.recovery")
    yield NOISE


def factor_effects(sample: Sample, factor: str) -> Iterator[Effect]:
    """How the highest level of a factor differs from the lowest, in scenarios that count at both; none for one level.

    `distance.field_only_difference`, `distance.suffix_for_80_difference`, and so on. Differences are between the
    recoveries of two single pairs, so they are means of ratios.
    """
    column = FACTORS[factor]
    others = [other for other in FACTORS.values() if other != column]
    levels = sample.rows[column]
    lowest, highest = levels.min(), levels.max()
    if lowest == highest:
        return
    compared: dict[str, Any] = {"by": column, "first": highest, "second": lowest, "within": ["scenario", *others]}
    if len(field_only := sample.of(intervention="field_only")):
        yield from field_only.difference(f"{factor}.field_only_difference", recoveries(field_only), **compared)
    for smallest in smallest_suffixes(sample, "scenario", *FACTORS.values()):
        yield from smallest.difference(f"{factor}.suffix_for_80_difference", "fraction", **compared)


@dataclass(frozen=True)
class CellBars(Bars):
    """Bars of cells; the paper has one value for a slot, which stands beside the slot's first cell."""

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the cells of one model."""
        known = [panel.effects[name] for name in self.effects if name in panel.effects]
        first = {cell.parameters["slot"]: cell.name for cell in reversed(known)}
        slots = {slot: f"{slot}.field_only.recovery" for slot in first}
        paper = {first[slot]: panel.paper[name] for slot, name in slots.items() if name in panel.paper}
        super().draw(axes, replace(panel, paper=paper))


@dataclass(frozen=True)
class ByDistance:
    """Field-only recovery over the mean distance from field to decision, all models."""

    title: str

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw all models into one axes."""
        levels(axes, 0.0, 1.0)
        for number, panel in enumerate(panel for panel in panels if panel.effects):
            cells = panel.select(f"{CELL}.field_only", "recovery")
            distances = {cell.name: float(panel.rows_of(cell)["distance"].mean()) for cell in cells}
            cells.sort(key=lambda cell: distances[cell.name])
            # Dodged, since all models have the same distances.
            places = [distances[cell.name] * 1.03**number for cell in cells]
            reach = [
                [cell.estimate - max(cell.low, -0.5) for cell in cells],
                [min(cell.high, 1.5) - cell.estimate for cell in cells],
            ]
            marker, color = model_marker(panels, panel), model_color(panels, panel)
            look: dict[str, Any] = {"fmt": marker, "ms": 4, "lw": 1.2, "color": color}
            axes.errorbar(places, [cell.estimate for cell in cells], yerr=reach, label=panel.model, **look)
        axes.set_xlabel("tokens from field to decision")
        axes.set_ylabel("recovery, field alone")
        axes.set_title(self.title)


def figure(panels: Sequence[Panel]) -> FigureSpec:
    """Field-only recovery by cell above, the suffix dose by cell below."""
    cells = cells_of(panels)
    looks = {
        CELL.format(**cell): (_label(cell, cells), color) for cell, color in zip(cells, cycle(_PALETTE), strict=False)
    }
    curves = {
        Curve(
            f"{CELL}.suffix_{{percent}}",
            fixed=tuple(cell.items()),
            also=((100.0, f"{CELL.format(**cell)}.full_downstream.recovery"),),
        ): looks[CELL.format(**cell)]
        for cell in cells
    }
    bars = {f"{name}.field_only.recovery": look for name, look in looks.items()}
    return FigureSpec(
        "Does a field act for itself when it is near, or named again?",
        (
            CellBars(bars, "recovery,\nfield alone", 2.6, label_size=7),
            Doses(curves, "recovery,\nlast part of the prompt", 2.1, "last % from field to decision"),
        ),
        main=ByDistance("Field alone, by distance and mentions"),
        key=lambda panels: effect_key("one skeleton", paper=any(panel.paper for panel in panels)),
    )


def cells_of(panels: Sequence[Panel]) -> list[Mapping[str, Any]]:
    """The cells that were measured in any model, as the parameters of their effects."""
    found = [cell.parameters for panel in panels for cell in panel.select(f"{CELL}.field_only", "recovery")]
    distinct = {tuple(parameters.values()): parameters for parameters in found}
    return sorted(distinct.values(), key=lambda cell: (SLOTS.index(cell["slot"]), cell["notes"], cell["mentions"]))


def _label(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """What tells a cell from the others."""
    parts = {
        "slot": _SLOT_LABELS[cell["slot"]],
        "notes": f"{cell['notes']} notes",
        "mentions": f"{cell['mentions']} named",
    }
    varied = [part for name, part in parts.items() if len({other[name] for other in cells}) > 1]
    return "\n".join(varied or [parts["slot"]])


READING = Reading(
    effects,
    figure,
    paper={
        f"{slot}.{effect}": PaperEntry("field_position_dose", place, metric)
        for slot, place in _PAPER_SLOTS.items()
        for effect, metric in (
            ("field_only.recovery", "field_only_recovery"),
            ("suffix_for_80", "suffix_fraction_for_80pct"),
        )
    },
    names=names,
)
