"""What the rows of `specificity` mean: recovery by selection and size, and the lead of the held-out sets."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Doses
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.differences import recovery_difference
from kvprobe.probes.kit.reading.patching import DECISION, conditions, decision_effects, over_draws
from kvprobe.probes.mechanism.specificity.probe import Specificity
from kvprobe.stats import NOISE, Effect, Sample, joined

_SELECTIONS = {
    "in_sample_{size}": ("ranked on the pair itself", COLORS["sky"]),
    "held_out_{size}": ("ranked on other skeletons", COLORS["blue"]),
    "matched_{size}": ("matched random sets", COLORS["orange"]),
    "random_{size}": ("random sets", COLORS["grey"]),
}


def effects(sample: Sample, probe: Specificity) -> Iterator[Effect]:
    """Recovery, margin shift and flip rate by selection and size.

    Of each size `lead_k.recovery`, by how much the held-out set recovers more than its matched sets, and
    `matched_k.reach_rate`, the share of matched sets that move the decision at least as far as the held-out set.
    """
    decisions = sample.of(measurement="decision")
    for condition, part in conditions(decisions, *_SELECTIONS):
        yield from decision_effects(over_draws(part), condition)
    for size in probe.sizes:
        held_out, matched = f"held_out_{size}", f"matched_{size}"
        both = decisions.of(intervention=(held_out, matched)).named(size=size)
        yield from recovery_difference(both, "lead_{size}.recovery", held_out, matched, by="intervention")
        best = both.rows[both.rows["intervention"] == held_out].set_index("pair")["margin"]
        drawn = both.where((both.rows["intervention"] == matched) & both.rows["pair"].isin(best.index))
        if len(drawn):
            reached = drawn.rows["margin"] >= drawn.rows["pair"].map(best)
            yield drawn.rate("matched_{size}.reach_rate", reached)
    if len(decisions):
        yield decisions.maximum("noise.margin", "noise_floor")


def names(probe: Specificity) -> Iterator[str]:
    """Those of `effects`."""
    for size in probe.sizes:
        yield from joined([condition.format(size=size) for condition in _SELECTIONS], DECISION)
        yield from (f"lead_{size}.recovery", f"matched_{size}.reach_rate")
    yield NOISE


READING = Reading(
    effects,
    FigureSpec(
        "Do a few particular positions carry the effect?",
        (Doses(_SELECTIONS, "recovery of the new decision", 3.0, ticks_of="held_out_{size}"),),
        main=DosesByModel(
            ("held_out_{size}", "recovery"), ("matched_{size}", "recovery"), "Held-out top k; dashed: matched random k"
        ),
        key_columns=3,
    ),
    paper={
        f"{ours}_{size}.recovery": PaperEntry("specificity", f"{theirs}_{size}", "decision_recovery")
        for ours, theirs in (("in_sample", "top"), ("random", "random"))
        for size in (1, 2, 4, 8, 16, 32, 64)
    },
    names=names,
)
