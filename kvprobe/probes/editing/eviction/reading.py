"""What the rows of `eviction` mean.

By method X and budget N in percent (`X_N`): `.accuracy` of both prompts, `.field_only.recovery` and
`.downstream_only.recovery` of the patched decision on what is left, `.erratum.new_rate`, and `.kept_policy`,
`.kept_field`, `.kept_delimiters`, the share of those entries that stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Doses
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.eviction.probe import Eviction
from kvprobe.probes.kit.reading.decoding import accuracy
from kvprobe.stats import Effect, Sample, joined

_LOOKS = {
    "snapkv": ("SnapKV", COLORS["blue"]),
    "h2o": ("H2O", COLORS["vermilion"]),
    "scissorhands": ("Scissorhands", COLORS["green"]),
    "streaming_llm": ("StreamingLLM", COLORS["purple"]),
    "delimiters": ("delimiters first", COLORS["orange"]),
    "no_delimiters": ("delimiters last", COLORS["sky"]),
    "random": ("random", COLORS["grey"]),
}
_KEPT = ("policy", "field", "delimiters")


def effects(sample: Sample, _: Eviction) -> Iterator[Effect]:
    """Decisions, notes, errata and what is kept, by method and budget."""
    for method, _budget, part in sample.by("method", "budget"):
        condition = f"{method}_{{budget}}"
        yield from accuracy(part, f"{condition}.accuracy")
        for patch in ("field_only", "downstream_only"):
            shift = part.rows[f"margin_{patch}"] - part.rows["margin"]
            yield part.recovery(f"{condition}.{patch}.recovery", shift)
        yield part.rate(f"{condition}.erratum.new_rate", "new_after_erratum")
        for name in _KEPT:
            yield part.mean(f"{condition}.kept_{name}", f"kept_{name}")


def names(probe: Eviction) -> Iterator[str]:
    """Those of `effects`."""
    metrics = "accuracy", "field_only.recovery", "downstream_only.recovery", "erratum.new_rate"
    arms = [f"{method}_{budget}" for method in probe.methods for budget in probe.budgets]
    yield from joined(arms, (*metrics, *(f"kept_{name}" for name in _KEPT)))


def _part(suffix: str, metric: str, ylabel: str, level: float) -> Doses:
    curves = {f"{method}_{{budget}}{suffix}": look for method, look in _LOOKS.items()}
    return Doses(curves, ylabel, 2.1, xlabel="entries kept (%)", metric=metric, levels=(level, 1.0), apart=0.06)


READING = Reading(
    effects,
    FigureSpec(
        "Part of the cache is evicted: what is left of the decision, of its notes, of an erratum?",
        (
            _part("", "accuracy", "right decisions", 0.5),
            _part(".downstream_only", "recovery", "recovery, all after\nthe field", 0.0),
            _part(".erratum", "new_rate", "new decisions\nafter an erratum", 0.0),
            _part("", "kept_policy", "share of the rule\nthat is kept", 0.0),
        ),
        main=DosesByModel(
            ("snapkv_{budget}", "accuracy"),
            ("random_{budget}", "accuracy"),
            "Right decisions: SnapKV; dashed: random",
            xlabel="entries kept (%)",
            ylabel="right decisions",
            log=False,
            levels=(0.5, 1.0),
        ),
    ),
    names=names,
)
