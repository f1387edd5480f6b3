"""What the rows of `multi_field` mean: right decisions by arm, those that must turn apart from those that must stay.

By arm X: `X.none.correct_rate`, `X.first...`, `X.second...`, `X.both...` by the fields changed; over all of them
`X.changed...` (decisions that the new state turns) and `X.unchanged...` (decisions that it leaves); `X.agreement` with
a full prefill, `X.margin_error` (largest difference from it, in logits) and `X.token_share` of an edit in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.multi_field.probe import ARMS, FLIPS, MultiField
from kvprobe.probes.kit.reading.editing import BASELINE_RATES
from kvprobe.probes.kit.reading.field_states import (
    AGAINST_PREFILL,
    STATE,
    against_prefill,
    shared_effects,
    state_effects,
)
from kvprobe.stats import NOISE, Effect, Sample, joined

_ARMS = {
    "stale": "stale",
    "field_only": "field only",
    "cacheblend": "CacheBlend-style",
    "erratum": "erratum",
    "field_and_erratum": "field + erratum",
    "hoist_to_end": "hoist to the end",
    "full_downstream": "full downstream",
}
_PAPER_FLIPS = {"none": "flip_none", "first": "flip_role", "second": "flip_status", "both": "flip_both"}


def effects(sample: Sample, _: MultiField) -> Iterator[Effect]:
    """Right decisions by arm and flip, against the full prefill, and the constant baselines."""
    for arm, part in sample.by("arm"):
        yield from state_effects(part, arm)
        for flip, flipped in part.by("flip"):
            yield from state_effects(flipped, f"{arm}.{flip}")
        for changed, some in part.by("changed"):
            yield from state_effects(some, f"{arm}.{'changed' if changed else 'unchanged'}")
        yield from against_prefill(part, arm)
    yield from sample.of(changed=True).difference(
        "field_alone.changed.difference",
        "correct",
        "arm",
        "field_only",
        "stale",
        within=("pair", "flip", "question"),
        noise_floor=None,
    )
    yield from shared_effects(sample.of(arm=ARMS[-1]))


def names(_: MultiField) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined(ARMS, (*STATE, *AGAINST_PREFILL, *joined((*FLIPS, "changed", "unchanged"), STATE)))
    yield from ("field_alone.changed.difference", "full_prefill.error_rate", *BASELINE_RATES, NOISE)


READING = Reading(
    effects,
    FigureSpec(
        "Two fields of one cached prompt are edited: which decisions are right?",
        (
            Rates(
                _ARMS,
                (
                    Series("{arm}.changed.correct_rate", "decisions that the edits must turn", COLORS["vermilion"]),
                    Series("{arm}.unchanged.correct_rate", "decisions that they must leave", COLORS["blue"], "s"),
                    Series("{arm}.both.correct_rate", "all decisions after both edits", COLORS["green"], "^"),
                ),
                "share of right decisions",
                3.8,
                baseline=("baseline.majority.correct_rate", "majority answer, all decisions"),
            ),
        ),
        main=RatesByModel(
            {f"{arm}.changed.correct_rate": label for arm, label in _ARMS.items()},
            "Edits of two fields",
            "share of right decisions",
        ),
        key_columns=3,
    ),
    paper={
        f"erratum.{ours}.correct_rate": PaperEntry("multi_field_edit", f"{theirs}/erratum", "P_correct")
        for ours, theirs in _PAPER_FLIPS.items()
    },
    names=names,
)
