"""What the rows of `repeated_edit` mean: whether decisions follow the current state, however often it was edited.

By arm X: `X.correct_rate`, by kind of decision `X.first.correct_rate`, `X.return...`, `X.untouched...`; the error rate
by edits so far `X.edits_5.error_rate` (1 to 5) and so on; `X.agreement` with a prefill of the current state,
`X.margin_error` (largest, in logits), `X.token_share` of an edit in its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.doses import Doses
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.repeated_edit.probe import ARMS, KINDS, RepeatedEdit
from kvprobe.probes.kit.reading.editing import BASELINE_RATES
from kvprobe.probes.kit.reading.field_states import (
    AGAINST_PREFILL,
    STATE,
    against_prefill,
    shared_effects,
    state_effects,
)
from kvprobe.stats import NOISE, Effect, Sample, joined

# Colours as in the frontier's figure, where the methods are the same.
_ARMS = {
    "stale": ("stale", COLORS["grey"]),
    "field_only": ("field only", COLORS["sky"]),
    "stacked_errata": ("errata, all kept", COLORS["purple"]),
    "erratum": ("erratum, current alone", COLORS["vermilion"]),
    "field_and_erratum": ("field + erratum", COLORS["orange"]),
    "hoist_to_end": ("hoist to the end", COLORS["green"]),
    "full_downstream": ("full downstream", COLORS["ink"]),
}
_LABELS = {arm: label for arm, (label, _) in _ARMS.items()}


def effects(sample: Sample, probe: RepeatedEdit) -> Iterator[Effect]:
    """Right decisions by arm, kind and number of edits, against the full prefill, and the constant baselines."""
    for arm, part in sample.by("arm"):
        yield from state_effects(part, arm)
        for kind, some in part.by("kind"):
            yield from state_effects(some, f"{arm}.{kind}")
        for done in range(0, probe.edits, probe.window):
            end = done + probe.window
            if len(window := part.of(edit=range(done + 1, end + 1)).named(edits=end)):
                yield from state_effects(window, f"{arm}.edits_{{edits}}")
        yield from against_prefill(part, arm)
    yield from _difference(sample, "field_over_stale.difference", "field_only", "stale")
    for part, name in ((sample, ""), (sample.of(kind="return"), "return.")):
        yield from _difference(part, f"current_over_stacked.{name}difference", "erratum", "stacked_errata")
    yield from shared_effects(sample.of(arm=ARMS[-1]))


def names(probe: RepeatedEdit) -> Iterator[str]:
    """Those of `effects`."""
    windows = [f"edits_{done + probe.window}" for done in range(0, probe.edits, probe.window)]
    yield from joined(ARMS, (*STATE, *AGAINST_PREFILL, *joined((*KINDS, *windows), STATE)))
    compared = ("field_over_stale", "current_over_stacked", "current_over_stacked.return")
    yield from joined(compared, "difference")
    yield from ("full_prefill.error_rate", *BASELINE_RATES, NOISE)


def _difference(sample: Sample, name: str, first: str, second: str) -> Iterator[Effect]:
    """How much more often the first arm is right than the second after the same edits."""
    yield from sample.difference(name, "correct", "arm", first, second, within=("pair", "edit"), noise_floor=None)


READING = Reading(
    effects,
    FigureSpec(
        "Two fields edited again and again: does the decision follow the current state?",
        (
            Doses(
                {f"{arm}.edits_{{edits}}": look for arm, look in _ARMS.items()},
                "share of wrong decisions",
                2.6,
                "edits so far",
                "error_rate",
                ylim=(-0.04, 1.06),
                apart=0.06,
            ),
            Rates(
                _LABELS,
                (
                    Series("{arm}.untouched.correct_rate", "field not edited yet", COLORS["grey"], "^"),
                    Series("{arm}.first.correct_rate", "value new", COLORS["blue"]),
                    Series("{arm}.return.correct_rate", "return to an earlier value", COLORS["vermilion"], "s"),
                ),
                "share of right decisions",
                3.6,
            ),
        ),
        main=RatesByModel(
            {f"{arm}.return.correct_rate": label for arm, label in _LABELS.items()},
            "Returns to an earlier value",
            "share of right decisions",
        ),
    ),
    paper={
        f"stacked_errata.{ours}.correct_rate": PaperEntry("repeated_edit", f"{theirs}/stacked_erratum", "P_correct")
        for ours, theirs in {"first": "to_processed", "return": "back_to_pending"}.items()
    },
    step=5,
    names=names,
)
