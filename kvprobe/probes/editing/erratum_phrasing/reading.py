"""What the rows of `erratum_phrasing` mean: which phrasings turn the decision, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.erratum_phrasing.probe import LINES, METHODS, ErratumPhrasing
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, baseline_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = {
    "none": "no line",
    "minimal": "the value alone",
    "session_line": "the session's line",
    "question": "a question",
    "restatement": "plain restatement",
    "update": "tagged update",
    "override": "tagged, override",
}
_PAPER_LINES = {
    "override": "override_full",
    "restatement": "bare_value",
    "minimal": "minimal",
    "question": "question",
}


def effects(sample: Sample, _: ErratumPhrasing) -> Iterator[Effect]:
    """Share of decisions for the new value and cost by method and line, what the field in place adds, baselines."""
    for method, line, part in sample.by("method", "line"):
        yield part.rate(f"{method}.{line}.new_rate", "correct")
        yield part.mean(f"{method}.{line}.tokens", "tokens", "tokens")
        yield part.mean(f"{method}.{line}.cost", "cost")
    for line, part in sample.by("line"):
        name = f"in_place.{line}.difference"
        yield from part.difference(name, "correct", "method", *reversed(METHODS), noise_floor=None)
    yield from baseline_effects(sample)
    yield sample.noise()


def names(_: ErratumPhrasing) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined(METHODS, LINES, ("new_rate", "tokens", "cost"))
    yield from joined("in_place", LINES, "difference")
    yield from (*BASELINE_RATES, NOISE)


@dataclass(frozen=True)
class _RatesAndTokens(Rates):
    """Decisions by line, with the tokens that the model runs for line and task at the right."""

    def draw(self, axes: Axes, panel: Panel) -> None:
        super().draw(axes, panel)
        for place, line in enumerate(self.arms):
            axes.annotate(
                f"{panel.effects[f'erratum.{line}.tokens'].estimate:.0f}",
                (1.0, place),
                (10, 0),
                ("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color=COLORS["grey"],
            )


READING = Reading(
    effects,
    FigureSpec(
        "How must an erratum be phrased? (grey: tokens run for line and task)",
        (
            _RatesAndTokens(
                _LINES,
                (
                    Series("erratum.{arm}.new_rate", "line on the stale cache", COLORS["blue"]),
                    Series(
                        "field_and_erratum.{arm}.new_rate", "field edited in place too", COLORS["vermilion"], marker="s"
                    ),
                ),
                "decisions for the new value",
                3.6,
            ),
        ),
        main=RatesByModel(
            {f"erratum.{line}.new_rate": label for line, label in _LINES.items()},
            "Phrasing of an erratum",
            "share of new decisions",
        ),
    ),
    paper={
        f"erratum.{ours}.new_rate": PaperEntry("erratum_phrasing", theirs, "P_correct")
        for ours, theirs in _PAPER_LINES.items()
    },
    names=names,
)
