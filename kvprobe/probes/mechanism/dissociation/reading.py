"""What the rows of `dissociation` mean: whether notes turn the decision by the conclusion or by what was read."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.bars import Bars
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.differences import recovery_difference
from kvprobe.probes.kit.reading.patching import DECISION, decision_effects, identity_errors, shapley_split
from kvprobe.probes.mechanism.dissociation.probe import FROM_DONOR, INTERVENTIONS, Dissociation
from kvprobe.stats import NOISE, Effect, Sample, joined


def effects(sample: Sample, _: Dissociation) -> Iterator[Effect]:
    """Recovery, margin shift and flip rate of each intervention, the split of the effect, the contrast of ME6.

    A prompt that the model itself decides wrongly has no notes of the conclusion it should have: what is patched from
    it is excluded.
    """
    for intervention, part in sample.by("intervention"):
        usable = part.of(source_right=True)
        if len(usable):
            yield from decision_effects(usable.excluding(len(part) - len(usable)), intervention)
    yield from shapley_split(sample, FROM_DONOR[:3], ("trigger", "notes"))
    yield from conclusion_over_content(sample)
    yield from identity_errors(sample, {"full_downstream": "m_donor"})
    if len(sample):
        yield sample.maximum("noise.margin", "noise_floor")


def names(_: Dissociation) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined(INTERVENTIONS, DECISION)
    yield from joined(("interaction", "shapley_trigger", "shapley_notes", "conclusion_over_content"), "recovery")
    yield from ("full_downstream.error", NOISE)


def conclusion_over_content(sample: Sample) -> Iterator[Effect]:
    """How much more notes of the other conclusion do than notes of other content with the same conclusion."""
    names = "other_field_notes", "same_conclusion_notes"
    both = sample.of(intervention=names)
    usable = both.rows.groupby("pair")["source_right"].transform("all").astype(bool)
    left_out = both.rows.loc[~usable, "pair"].nunique()
    part = both.where(usable).excluding(left_out)
    yield from recovery_difference(part, "conclusion_over_content.recovery", *names, by="intervention")


READING = Reading(
    effects,
    FigureSpec(
        "Do notes hold the conclusion, or the content it was drawn from?",
        (
            Bars(
                {
                    "trigger_only.recovery": ("trigger\nonly", COLORS["vermilion"]),
                    "notes.recovery": ("notes\nafter it", COLORS["blue"]),
                    "full_downstream.recovery": ("both", COLORS["grey"]),
                },
                "recovery of the\nother decision,\nother trigger",
                2.3,
            ),
            Bars(
                {
                    "other_field_notes.recovery": ("notes, other\nconclusion,\nsame rule", COLORS["blue"]),
                    "same_conclusion_notes.recovery": ("notes, same\nconclusion,\nother content", COLORS["green"]),
                    "same_conclusion_tokens.recovery": ("field and\ntrigger of\nthe latter", COLORS["vermilion"]),
                },
                "recovery of the\nother decision,\nother field",
                2.5,
                label_size=7.5,
            ),
        ),
        main=EffectsByModel(
            {
                "trigger_only.recovery": "trigger\nonly",
                "notes.recovery": "notes",
                "other_field_notes.recovery": "other\nconclusion",
                "same_conclusion_notes.recovery": "same\nconclusion",
            },
            "Notes: conclusion or content?",
        ),
    ),
    paper={
        f"{condition}.recovery": PaperEntry("dissociation", condition, "decision_recovery")
        for condition in FROM_DONOR[:3]
    },
    step=3,
    names=names,
)
