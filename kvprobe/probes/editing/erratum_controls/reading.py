"""What the rows of `erratum_controls` mean: whether it is what the line says that turns the decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.erratum_controls.probe import EXPECTED, ErratumControls
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, baseline_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AGAINST = ("neutral", "random", "old_value", "irrelevant_field", "unmentioned_value", "early_reused")
_ARMS = {
    "stale": "no line",
    "neutral": "neutral, as long",
    "random": "random, as long",
    "old_value": "old value",
    "irrelevant_field": "irrelevant field",
    "unmentioned_value": "value of no case",
    "new_then_old": "new, then old",
    "old_then_new": "old, then new",
    "irrelevant_then_new": "irrelevant, then new",
    "early_reused": "early, rest reused",
    "early_recomputed": "early, rest rerun",
    "new_value": "new value (erratum)",
}


def effects(sample: Sample, _: ErratumControls) -> Iterator[Effect]:
    """Share of decisions for the new value and shift of the margin by arm, differences within pairs, baselines."""
    for arm, part in sample.by("arm"):
        yield part.rate(f"{arm}.new_rate", "correct")
        yield part.mean(f"{arm}.margin_shift", part.shift, "logits", noise_floor=part.floor)
    for arm in _AGAINST:
        name = f"value.against_{arm}.difference"
        yield from sample.difference(name, "correct", "arm", "new_value", arm, noise_floor=None)
    if len(judged := sample.measured("as_expected")):
        yield judged.rate("as_expected", "as_expected")
    yield from baseline_effects(sample)
    yield sample.noise()


def names(_: ErratumControls) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined(EXPECTED, ("new_rate", "margin_shift"))
    yield from joined("value", [f"against_{arm}" for arm in _AGAINST], "difference")
    yield from ("as_expected", *BASELINE_RATES, NOISE)


@dataclass(frozen=True)
class _RatesAsExpected(Rates):
    """Decisions by arm, with the half of the axis shaded that the line is expected to lead to."""

    def draw(self, axes: Axes, panel: Panel) -> None:
        super().draw(axes, panel)
        for place, arm in enumerate(self.arms):
            if EXPECTED[arm] is not None:
                left = 0.5 if EXPECTED[arm] else -0.04
                axes.fill_between([left, left + 0.54], place - 0.46, place + 0.46, color="#EAF3EA", lw=0, zorder=0)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        from matplotlib.patches import Patch

        return [*super().handles(panels), Patch(color="#D5E8D5", lw=0, label="expected decision")]


READING = Reading(
    effects,
    FigureSpec(
        "Is it what the erratum says that turns the decision?",
        (
            _RatesAsExpected(
                _ARMS, (Series("{arm}.new_rate", "measured", COLORS["blue"]),), "decisions for the new value", 4.6
            ),
        ),
        main=RatesByModel(
            {f"{arm}.new_rate": label for arm, label in _ARMS.items()},
            "What the erratum says",
            "share of new decisions",
        ),
    ),
    paper={
        f"{arm}.new_rate": PaperEntry(experiment, condition, metric)
        for arm, experiment, condition, metric in (
            ("stale", "erratum_content_control", "stale", "P_correct"),
            ("new_value", "erratum_content_control", "err_correct", "P_correct"),
            ("old_value", "erratum_content_control", "err_wrong", "P_correct"),
            ("neutral", "erratum_content_control", "err_irrelevant", "P_correct"),
            ("irrelevant_field", "erratum_overcorrection", "irrelevant_field_erratum", "decision_flips"),
            ("irrelevant_then_new", "erratum_stacked", "irrelevant_then_relevant", "P_correct"),
        )
    },
    step=3,
    names=names,
)
