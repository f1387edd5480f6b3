"""What the rows of `scrub` mean: drift, interchange by the note's size, and the share that the hypothesis explains."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvprobe.errors import SampleError
from kvprobe.figures.bars import Bars, effect_key, recovery_by_skeleton
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.doses import Doses, dose_lines
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.patching import DECISION, conditions, decision_effects, over_draws
from kvprobe.probes.mechanism.scrub.hypotheses import ARMS, OTHER_WORDING
from kvprobe.probes.mechanism.scrub.probe import Scrub
from kvprobe.stats import NOISE, Effect, Sample, joined

_SWEEPS = {
    "note_opposite_{size}": ("note", COLORS["blue"]),
    "rest_opposite_{size}": ("rest", COLORS["green"]),
    "in_sample_note_opposite_{size}": ("note, ranked on the prompt itself", COLORS["sky"]),
}


def effects(sample: Sample, _: Scrub) -> Iterator[Effect]:
    """Recovery, margin shift, flip rate, drift and coverage of each arm, and the share explained.

    `X.drift` is |margin' - margin| over the gap. Prompts that were not scrubbed are excluded.

    Raises:
        SampleError: no prompt was scrubbed.
    """
    decisions = sample.of(measurement="decision")
    if not len(decisions):
        raise SampleError("No prompt was scrubbed: the model decides too few of them correctly.")
    unedited = sample.of(measurement="unedited")
    scrubbed = decisions.rows.groupby(["pair", "direction"]).ngroups
    decisions = decisions.excluding(max(0, len(unedited) - scrubbed))
    for condition, part in conditions(decisions, *_SWEEPS):
        yield from decision_effects(over_draws(part), condition)
        yield part.recovery(f"{condition}.drift", part.shift.abs())
        yield part.mean(f"{condition}.coverage", "coverage")
    yield from explained(decisions)
    yield sample.maximum("noise.margin", "noise_floor")


def names(probe: Scrub) -> Iterator[str]:
    """Those of `effects`."""
    arms = [*ARMS, *(f"{arm}_other_wording" for arm in OTHER_WORDING)]
    sized = [condition.format(size=size) for condition in _SWEEPS for size in probe.sizes]
    yield from joined((*arms, *sized), (*DECISION, "drift", "coverage"))
    yield from ("hypothesis.explained", NOISE)


def explained(decisions: Sample) -> Iterator[Effect]:
    """Of the margin that is lost when everything is resampled freely, the share that the hypothesis keeps."""
    both = decisions.of(intervention=("hypothesis", "anything"))
    margin = both.rows.pivot_table(index=["pair", "direction"], columns="intervention", values="margin")
    if {"hypothesis", "anything"} <= set(margin):
        prompts = both.per("pair", "direction", m_base="first")
        margin = margin.loc[prompts.rows.index]
        lost = margin["anything"] - prompts.rows["m_base"]
        kept = margin["anything"] - margin["hypothesis"]
        yield prompts.ratio("hypothesis.explained", kept, lost, noise_floor=prompts.floor)


def drift_dots(panel: Panel, effect: Effect) -> pd.Series:
    """Each skeleton's drift."""
    rows = panel.rows_of(effect)
    return recovery_by_skeleton(rows, (rows["margin"] - rows["m_base"]).abs())


READING = Reading(
    effects,
    FigureSpec(
        "Entries resampled from other scenarios: is the conclusion all that is read?",
        (
            Bars(
                {
                    "note_same.drift": ("note", COLORS["blue"]),
                    "rest_same.drift": ("rest", COLORS["green"]),
                    "all_same.drift": ("both", COLORS["sky"]),
                    "hypothesis.drift": ("whole\nclaim", COLORS["purple"]),
                    "anything.drift": ("any-\nthing", COLORS["grey"]),
                },
                "drift, share of the gap\n(same conclusion)",
                2.0,
                levels=(0.0,),
                dots=drift_dots,
            ),
            Bars(
                {
                    "note_opposite.recovery": ("note", COLORS["blue"]),
                    "rest_opposite.recovery": ("rest", COLORS["green"]),
                    "note_opposite_other_wording.recovery": ("note,\nreworded", COLORS["blue"]),
                    "rest_opposite_other_wording.recovery": ("rest,\nreworded", COLORS["green"]),
                },
                "recovery of the\nother conclusion",
                2.1,
            ),
            Doses(
                _SWEEPS,
                "recovery of the\nother conclusion",
                2.0,
                "positions in the note",
                ticks_of="note_opposite_{size}",
            ),
        ),
        main=EffectsByModel(
            {
                "note_opposite.recovery": "note,\nother concl.",
                "rest_opposite.recovery": "rest,\nother concl.",
                "hypothesis.recovery": "whole\nclaim",
                "anything.recovery": "any-\nthing",
            },
            "Scrubbed across scenarios",
        ),
        key=lambda panels: [
            *effect_key("one skeleton", paper=any(panel.paper for panel in panels)),
            *dose_lines(dict(_SWEEPS.values())),
        ],
    ),
    paper={
        **{
            f"{arm}.drift": PaperEntry("scrub", f"drift_{arm}", "abs_drift_over_gap")
            for arm in ("note_same", "rest_same", "all_same")
        },
        "note_opposite.recovery": PaperEntry("scrub", "rec_note_opp", "recovery_to_opposite"),
        "rest_opposite.recovery": PaperEntry("scrub", "rec_rest_opp", "recovery_to_opposite"),
    },
    step=4,
    names=names,
)
