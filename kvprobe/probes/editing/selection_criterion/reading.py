"""What the rows of `selection_criterion` mean: recovery by criterion and size, recomputed and copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.selection_criterion.probe import (
    BLIND,
    COPIED,
    PROFILES,
    RANDOM,
    UPPER_BOUNDS,
    SelectionCriterion,
)
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, arm_effects, baseline_effects, recovery_difference
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMED = (*BLIND, *PROFILES, *UPPER_BOUNDS)
_CONTRASTS = (
    *((name, RANDOM) for name in _NAMED),
    ("profile", "decision_attention"),
    ("profile", "first_layer_deviation"),
    ("profile", "suffix"),
    ("profile_same_field", "profile"),
    ("profile_kv_change", "profile"),
    ("profile_kv_change", "decision_attention"),
    ("decision_attention", "first_layer_deviation"),
    ("decision_attention", "kv_change"),
    ("in_sample", "profile"),
)
_CRITERIA = {
    "random": ("at random", COLORS["grey"]),
    "suffix": ("the last tokens", COLORS["blue"]),
    "first_layer_deviation": ("change in first layers", COLORS["blue"]),
    "decision_attention": ("attention of the decision", COLORS["blue"]),
    "profile": ("profile: effect,\nother skeletons", COLORS["green"]),
    "profile_same_field": ("profile: effect,\nsame field", COLORS["green"]),
    "profile_kv_change": ("profile: KV change,\nother skeletons", COLORS["green"]),
    "in_sample": ("effect on this pair\n(upper bound)", COLORS["vermilion"]),
    "kv_change": ("KV change of this pair\n(upper bound)", COLORS["vermilion"]),
}
_PAPER_NAMES = {
    "decision_attention": "decision_attention",
    "suffix": "suffix",
    "kv_change": "kv_change",
    "in_sample": "decision_oracle",
}


def effects(sample: Sample, _: SelectionCriterion) -> Iterator[Effect]:
    """Correctness and recovery by criterion and size, paired differences, what copying overstates, baselines."""
    for criterion, _, arm, part in sample.by("criterion", "size", "arm"):
        if arm.endswith(COPIED):
            yield part.rate(f"{criterion}_{{size}}.copied_correct_rate", "correct")
            yield part.recovery(f"{criterion}_{{size}}.copied_recovery")
        else:
            yield from arm_effects(part, f"{criterion}_{{size}}")
    for size, part in sample.by("size"):
        for one, other in _CONTRASTS:
            yield from recovery_difference(
                part, f"{one}_over_{other}_{{size}}.recovery", f"{one}_{size}", f"{other}_{size}"
            )
        for one in _NAMED:
            arms = f"{one}_{size}{COPIED}", f"{one}_{size}"
            yield from recovery_difference(part, f"{one}_copy_gap_{{size}}.recovery", *arms)
    yield from baseline_effects(sample)
    yield sample.maximum("noise.margin", "noise_floor")


def names(probe: SelectionCriterion) -> Iterator[str]:
    """Those of `effects`."""
    for size in probe.sizes:
        chosen = [f"{criterion}_{size}" for criterion in (*_NAMED, RANDOM)]
        yield from joined(chosen, ("correct_rate", "recovery", "copied_correct_rate", "copied_recovery"))
        yield from joined([f"{one}_over_{other}_{size}" for one, other in _CONTRASTS], "recovery")
        yield from joined([f"{one}_copy_gap_{size}" for one in _NAMED], "recovery")
    yield from (*BASELINE_RATES, NOISE)


def _sizes(panels: Sequence[Panel]) -> list[int]:
    return sorted({int(size) for panel in panels for size in panel.curve(f"{RANDOM}_{{size}}", "recovery")})


def _by_size(panels: Sequence[Panel]) -> tuple[Rates, ...]:
    """Recovery by criterion, recomputed and copied, a row for each size."""
    return tuple(
        Rates(
            {criterion: label for criterion, (label, _) in _CRITERIA.items()},
            (
                Series(f"{{arm}}_{size}.recovery", "recomputed", COLORS["ink"]),
                Series(f"{{arm}}_{size}.copied_recovery", "copied from a full prefill", COLORS["ink"], filled=False),
            ),
            f"recovery, K = {size}",
            3.8,
            levels=(0.0, 1.0),
            xlim=(-0.2, 1.25),
            colors={criterion: color for criterion, (_, color) in _CRITERIA.items()},
        )
        for size in _sizes(panels) or [0]
    )


@dataclass(frozen=True)
class _LargestSize:
    """Recovery by criterion at the largest size, recomputed, all models."""

    title: str = "Which tokens are recomputed"

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        size = max(_sizes(panels), default=0)
        labels = {f"{name}_{size}.recovery": label.replace("\n", " ") for name, (label, _) in _CRITERIA.items()}
        title = f"{self.title} (K = {size})"
        EffectsByModel(labels, title, levels=(), label_size=7, slanted=True).draw(axes, panels)


READING = Reading(
    effects,
    FigureSpec("Which few tokens after the field should an edit recompute?", _by_size, main=_LargestSize()),
    paper={
        f"{ours}_{k}.copied_recovery": PaperEntry("selection_criterion", f"{theirs}@{k}", "decision_recovery")
        for ours, theirs in _PAPER_NAMES.items()
        for k in (8, 16, 32, 64)
    },
    names=names,
)
