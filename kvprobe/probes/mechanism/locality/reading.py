"""What the rows of `locality` mean: the split of the effect between the field's entries and those after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from kvprobe.figures.bars import Bars
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.profiles import Profiles
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.patching import DECISION, cache_change_effects, decision_effects, shapley_split
from kvprobe.probes.mechanism.locality.probe import INTERVENTIONS, Locality
from kvprobe.stats import NOISE, Effect, Sample, joined

_REGIONS = {
    "before": ("before the field", COLORS["green"], "s"),
    "field": ("field", COLORS["vermilion"], "o"),
    "downstream": ("downstream", COLORS["blue"], "^"),
}


def effects(sample: Sample, _: Locality) -> Iterator[Effect]:
    """Recovery, margin shift and flip rate of each intervention, split of the effect, blast radius, noise."""
    decisions = sample.of(measurement="decision")
    for intervention, part in decisions.by("intervention"):
        yield from decision_effects(part, intervention)
    yield from shapley_split(decisions, INTERVENTIONS[:3], ("field", "rest"))
    for intervention, ought in (("full_downstream", "m_donor"), ("no_op", "m_base")):
        if len(part := decisions.of(intervention=intervention)):
            yield part.maximum(f"{intervention}.error", (part.rows["margin"] - part.rows[ought]).abs())
    yield from cache_change_effects(sample.of(measurement="cache_change"))
    if len(decisions):
        yield decisions.maximum("noise.margin", "noise_floor")


def names(_: Locality) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined(INTERVENTIONS, DECISION)
    yield from joined(("interaction", "shapley_field", "shapley_rest"), "recovery")
    yield from joined(("blast_radius", "relative_change"), _REGIONS)
    yield from ("full_downstream.error", "no_op.error", NOISE)


def change_by_region(panel: Panel) -> Mapping[str, tuple[pd.Series, str, str]]:
    """Mean relative change of keys and values over layers, a line for each region."""
    changes = panel.rows[panel.rows["measurement"] == "cache_change"]
    relative = changes.assign(change=changes[["relative_keys", "relative_values"]].mean(axis=1))
    means = relative.groupby(["region", "layer"])["change"].mean()
    regions = set(means.index.get_level_values("region"))
    return {
        label: (means[region], color, marker)
        for region, (label, color, marker) in _REGIONS.items()
        if region in regions
    }


READING = Reading(
    effects,
    FigureSpec(
        "Which cache entries carry a changed field's effect on the decision?",
        (
            Bars(
                {
                    "field_only.recovery": ("field\nonly", COLORS["vermilion"]),
                    "downstream_only.recovery": ("downstream\nonly", COLORS["blue"]),
                    "full_downstream.recovery": ("both", COLORS["grey"]),
                },
                "recovery of the new decision",
                2.6,
            ),
            Profiles(change_by_region, "relative change\nof keys and values", 1.9),
        ),
        main=EffectsByModel(
            {
                "field_only.recovery": "field\nonly",
                "downstream_only.recovery": "downstream\nonly",
                "full_downstream.recovery": "both",
            },
            "The effect sits after the field",
        ),
    ),
    paper={
        f"{condition}.recovery": PaperEntry("locality_patch", condition, "decision_recovery")
        for condition in ("field_only", "full_downstream")
    },
    finding="The field's own entries recover {field_only.recovery} of the change in the logit difference, the entries "
    "after it {downstream_only.recovery}.",
    step=1,
    names=names,
)
