"""What the rows of `injection` mean: how far the margin follows the injected notes, and how often the decision turns.

The two are kept apart, since a margin may move far without the decision turning (critique G2).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Doses
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.directions import DIRECTIONS
from kvprobe.probes.kit.reading.patching import DECISION, conditions, decision_effects, over_draws
from kvprobe.probes.mechanism.injection.probe import ALL, Injection
from kvprobe.stats import NOISE, Effect, Sample, joined

_SELECTIONS = {
    "in_sample_{size}": ("ranked on the pair itself", COLORS["sky"]),
    "held_out_{size}": ("ranked on other skeletons", COLORS["blue"]),
    "random_{size}": ("random sets", COLORS["grey"]),
}
_HALF = 0.5


def effects(sample: Sample, _: Injection) -> Iterator[Effect]:
    """For every dose the margin's shift and the decision's flips, each on its own; also by direction for all notes.

    `argmax_rate` is the share of injections after which the injected answer is the likeliest of all tokens;
    `half_shift_rate`, the share of recoveries above one half, is what the paper's replication calls following.
    """
    for condition, part in conditions(sample, *_SELECTIONS):
        yield from decision_effects(over_draws(part), condition)
        yield part.rate(f"{condition}.argmax_rate", "injected_is_argmax")
        yield part.rate(f"{condition}.half_shift_rate", part.shift / part.gap > _HALF)
    for _, part in sample.of(intervention=ALL).by("direction"):
        yield from decision_effects(part, f"{ALL}_{{direction}}")
    if len(sample):
        yield sample.maximum("noise.margin", "noise_floor")


def names(probe: Injection) -> Iterator[str]:
    """Those of `effects`."""
    sets = [condition.format(size=size) for condition in _SELECTIONS for size in probe.sizes]
    yield from joined((*sets, ALL), (*DECISION, "argmax_rate", "half_shift_rate"))
    yield from joined((*(f"{ALL}_{way}" for way in DIRECTIONS),), DECISION)
    yield NOISE


def doses(metric: str, ylabel: str, xlabel: str) -> Doses:
    """One metric over the number of injected positions, with its value for all notes as a line."""
    ceilings = {f"{ALL}.{metric}": ("all notes", COLORS["vermilion"], "-")}
    return Doses(_SELECTIONS, ylabel, 2.2, xlabel, metric, ceilings=ceilings, ticks_of="held_out_{size}")


READING = Reading(
    effects,
    FigureSpec(
        "Does a decision follow injected notes of the other conclusion?",
        (
            doses("recovery", "shift of the margin,\nshare of the gap", ""),
            doses("flip_rate", "share of\ndecisions turned", "injected positions"),
        ),
        main=DosesByModel(
            ("held_out_{size}", "recovery"),
            ("held_out_{size}", "flip_rate"),
            "Injected notes: shift; dashed: flips",
            xlabel="injected positions",
            ylabel="share",
        ),
        key_columns=3,
    ),
    paper={
        f"{ALL}.recovery": PaperEntry("false_note_injection", "all_downstream", "recovery_to_injected"),
        f"{ALL}.flip_rate": PaperEntry("false_note_injection", "all_downstream", "decision_flip_rate"),
        **{
            f"in_sample_{size}.recovery": PaperEntry("false_note_injection", f"top_{size}", "recovery_to_injected")
            for size in (1, 2, 4, 8, 16, 32)
        },
    },
    names=names,
)
