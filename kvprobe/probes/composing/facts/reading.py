"""What the rows of `facts` mean: right answers and agreement with a full prefill, the list early and late.

`X` is `early` or `late`; each arm has the effects of `fidelity_effects`, and

    X.arm.exact_match, X.full_prefill.exact_match   greedy answers that are right
    late_less_early.arm.exact_match                 by scenario
    X.seam_gain.exact_match                         seam_N less splice_none
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvprobe.figures.bars import Bars, shares_by_skeleton
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.composing.facts.probe import FactsProbe
from kvprobe.probes.kit.fidelity import FULL_PREFILL, REMOVED
from kvprobe.probes.kit.reading.fidelity import FIDELITY, KAPPA_MAY_LACK, PROMPT, by_arm, fidelity_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

_REFERENCE = "{insertion}.full_prefill"
_ARMS = {
    FULL_PREFILL: ("full\nprefill", COLORS["ink"]),
    "splice_none": ("splice,\nno header", COLORS["vermilion"]),
    "splice_neutral": ("splice,\nheader", COLORS["blue"]),
    "seam_8": ("seam\nof 8", COLORS["orange"]),
    REMOVED: ("no\nlist", COLORS["grey"]),
}
_PLACES = {"early": "right after the opening line", "late": "right before the question"}


def effects(sample: Sample, probe: FactsProbe) -> Iterator[Effect]:
    """Fidelity and exact matches of every arm with the list early and late, contrasts, noise."""
    for _, part in sample.by("insertion"):
        if len(once := part.of(arm=REMOVED)):
            yield once.rate(f"{_REFERENCE}.exact_match", "reference_exact")
        for arm, some in by_arm(part, probe.arms()):
            yield from fidelity_effects(some, f"{{insertion}}.{arm}", equivalence=probe.equivalence)
            yield some.rate(f"{{insertion}}.{arm}.exact_match", "exact")
        arms = f"seam_{probe.seam}", "splice_none"
        yield from part.difference("{insertion}.seam_gain.exact_match", "exact", "arm", *arms, within=PROMPT)
    for arm, part in by_arm(sample, probe.arms()):
        name, within = f"late_less_early.{arm}.exact_match", ("scenario", "prompt")
        yield from part.difference(name, "exact", "insertion", "late", "early", within=within)
    yield sample.noise()


def names(probe: FactsProbe) -> Iterator[str]:
    """Those of `effects`."""
    arms = [arm.name for arm in probe.arms()]
    yield from joined(_PLACES, arms, (*FIDELITY, "exact_match"))
    yield from joined((*_PLACES,), (FULL_PREFILL, "seam_gain"), "exact_match")
    yield from joined("late_less_early", arms, "exact_match")
    yield NOISE


def exact_by_skeleton(panel: Panel, effect: Effect) -> pd.Series:
    """Each scenario's share of right answers."""
    column = "reference_exact" if effect.condition == _REFERENCE else "exact"
    return shares_by_skeleton({"exact_match": column})(panel, effect)


def _bars(insertion: str, where: str) -> Bars:
    return Bars(
        {f"{insertion}.{arm}.exact_match": look for arm, look in _ARMS.items()},
        f"correct answers, facts {insertion}\n({where})",
        2.4,
        levels=(1.0,),
        ylim=(-0.05, 1.08),
        label_size=6.5,
        dots=exact_by_skeleton,
        dot="one scenario",
    )


READING = Reading(
    effects,
    FigureSpec(
        "Facts compiled separately: is the one asked for found?",
        tuple(_bars(insertion, where) for insertion, where in _PLACES.items()),
        main=EffectsByModel(
            {
                f"{insertion}.{arm}.exact_match": f"{label}\n{insertion}"
                for arm, label in ((FULL_PREFILL, "full"), ("splice_none", "splice"), (REMOVED, "no list"))
                for insertion in _PLACES
            },
            "Facts, early and late",
            "correct answers",
            levels=(),
            limits=(0.0, 1.0),
            ylim=(-0.05, 1.08),
            label_size=6.5,
        ),
    ),
    paper={
        f"{insertion}.{ours}": PaperEntry("facts_insertion_position", condition, metric)
        for insertion in _PLACES
        for ours, condition, metric in (
            (f"{FULL_PREFILL}.exact_match", f"{insertion}/full", "accuracy"),
            ("splice_none.exact_match", f"{insertion}/transplant", "accuracy"),
            ("splice_none.agreement", insertion, "agreement"),
        )
    },
    may_lack={
        "early.*": "No prompt of the task has its list early.",
        "late.*": "No prompt of the task has its list late.",
        "late_less_early.*": "The task has its list at one place only.",
        **KAPPA_MAY_LACK,
    },
    names=names,
)
