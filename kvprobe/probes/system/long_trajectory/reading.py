"""What the rows of `long_trajectory` mean: agreement with the oracle turn by turn, and its slope.

By method X and period: `X.period_6.agreement` (with its oracle), `.correct_rate` (by the rule), `.margin_error` (mean,
in logits), each also for `.first_third.` and so on; `.agreement_slope` and `.margin_error_slope` (change over 100
turns), `.prompt_tokens` (at the end), `.token_share` (tokens run in a turn, of the prompt). Beside them
`oracle.period_6.correct_rate`, `floor.period_6.agreement` and `.margin_error` (largest), and constant baselines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.profiles import Profiles
from kvprobe.figures.rates import RatesByModel
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.system.long_trajectory.probe import FLOOR, LongTrajectory
from kvprobe.stats import NOISE, Effect, Sample, joined

THIRDS = ("first_third", "middle_third", "last_third")
# Colours as in the frontier's figure, where the methods are the same.
_METHODS = {
    "full_downstream": ("full downstream", COLORS["ink"], "X"),
    "field_only": ("field only", COLORS["sky"], "s"),
    "errata_kept": ("errata, all kept", COLORS["purple"], "P"),
    "erratum": ("erratum, current alone", COLORS["vermilion"], "p"),
    "field_and_erratum": ("field + erratum", COLORS["orange"], "^"),
    "periodic_reprefill": ("field only, periodic prefill", COLORS["green"], "d"),
}
_FLOOR = ("floor: errata kept, cached against prefilled", COLORS["grey"], ".")
_BINS = 10


def effects(sample: Sample, probe: LongTrajectory) -> Iterator[Effect]:
    """Agreement, right decisions and margin errors by method and period, their slopes, the floor and baselines."""
    for _, method, part in sample.by("period", "method"):
        name = f"{method}.period_{{period}}"
        if method == FLOOR:
            yield part.rate(f"{name}.agreement", "agrees")
            yield part.maximum(f"{name}.margin_error", "margin_error")
            continue
        yield from _rates(part, name)
        yield from _changes(part, name)
        for number, third in enumerate(THIRDS):
            turns = [turn for turn in range(probe.turns) if turn * len(THIRDS) // probe.turns == number]
            yield from _rates(part.of(turn=turns), f"{name}.{third}")
        if method == "full_downstream":
            yield from _shared_effects(part, probe)
    yield sample.maximum("noise.margin", "noise_floor")


def names(probe: LongTrajectory) -> Iterator[str]:
    """Those of `effects`."""
    periods, rates = [f"period_{period}" for period in probe.periods], ("agreement", "correct_rate", "margin_error")
    slopes = ("agreement_slope", "margin_error_slope", "prompt_tokens", "token_share")
    yield from joined(_METHODS, periods, (*rates, *slopes, *joined(THIRDS, rates)))
    yield from joined(FLOOR, periods, ("agreement", "margin_error"))
    yield from joined(("oracle", "baseline.majority", "baseline.same"), periods, "correct_rate")
    yield NOISE


def slope(rows: pd.DataFrame, column: str) -> float:
    """Least-squares change of a column over 100 turns, every trajectory with a level of its own."""
    turn = rows["turn"] - rows.groupby("pair")["turn"].transform("mean")
    values = rows[column].astype(float)
    return float(100 * (turn * values).sum() / (turn**2).sum())


def _rates(sample: Sample, condition: str) -> Iterator[Effect]:
    if len(sample):
        yield sample.rate(f"{condition}.agreement", "agrees")
        yield sample.rate(f"{condition}.correct_rate", "correct")
        yield sample.mean(f"{condition}.margin_error", "margin_error", "logits")


def _changes(sample: Sample, condition: str) -> Iterator[Effect]:
    """Slopes over the turns, the length of the prompt at their end, and the tokens run in a turn."""
    if sample.rows["turn"].nunique() > 1:
        for metric, column, unit in (("agreement", "agrees", "fraction"), ("margin_error", "margin_error", "logits")):
            change = partial(slope, column=column)
            yield sample.bootstrap(f"{condition}.{metric}_slope", change, f"{unit} per 100 turns")
    end = sample.of(turn=sample.rows["turn"].max())
    yield end.mean(f"{condition}.prompt_tokens", "prompt_tokens", "tokens")
    yield sample.mean(f"{condition}.token_share", "token_share")


def _shared_effects(sample: Sample, probe: LongTrajectory) -> Iterator[Effect]:
    """The oracle by the rule, and what one would score by saying one thing, or the last turn's right answer, always."""
    yield sample.rate("oracle.period_{period}.correct_rate", "oracle_correct")
    share = sample.rows.groupby("pair")["right"].transform("mean")
    yield sample.mean("baseline.majority.period_{period}.correct_rate", share.where(share > 0.5, 1 - share))
    if len(later := sample.of(turn=range(1, probe.turns))):
        yield later.mean("baseline.same.period_{period}.correct_rate", 1 - later.rows["changed"].astype(float))


def over_turns(panel: Panel, *, period: int, column: str) -> dict[str, tuple[pd.Series, str, str]]:
    """Means of a column over trajectories and a tenth of the turns, a line for each method."""
    lines = {}
    for method, (label, color, marker) in {**_METHODS, FLOOR: _FLOOR}.items():
        for effect in panel.select(f"{method}.period_{{period}}", "agreement", period=period):
            rows, turns = panel.rows_of(effect), int(panel.rows["turn"].max()) + 1
            size = -(-turns // _BINS)
            means = rows[column].astype(float).groupby(rows["turn"] // size).mean()
            lines[label] = means.set_axis(means.index * size + (size - 1) / 2), color, marker
    return lines


def figure(panels: Sequence[Panel]) -> FigureSpec:
    """Agreement and margin error over the turns, two rows for each period."""
    agreements = [e for panel in panels for e in panel.select("full_downstream.period_{period}", "agreement")]
    periods = sorted({int(effect.parameters["period"]) for effect in agreements}) or [1]
    parts = []
    for period in periods:
        every = "every turn" if period == 1 else f"every {period} turns"
        for column, label, ylim in (
            ("agrees", "agreement with oracle", (-0.04, 1.06)),
            ("margin_error", "margin error (logits)", (0, None)),
        ):
            lines = partial(over_turns, period=period, column=column)
            parts.append(Profiles(lines, f"change {every}\n{label}", 1.9, xlabel="turn", ylim=ylim, nested=True))
    return FigureSpec(
        "Many turns on one cache while the state keeps changing",
        tuple(parts),
        main=RatesByModel(
            {f"{name}.period_{periods[-1]}.last_third.agreement": label for name, (label, *_) in _METHODS.items()},
            "Long trajectories, last third",
            "agreement with the oracle",
        ),
    )


READING = Reading(
    effects,
    figure,
    paper={
        ours.format(period): PaperEntry("long_trajectory", f"toggle_every_{period}", theirs)
        for period in (1, 6)
        for ours, theirs in {
            "floor.period_{}.agreement": "mean_agree",
            "errata_kept.period_{}.first_third.correct_rate": "patched_acc_first_third",
            "errata_kept.period_{}.last_third.correct_rate": "patched_acc_last_third",
        }.items()
    },
    step=3,
    names=names,
)
