"""What the rows of `removal` mean.

By arm X: `X.leak`, what is left of the difference between the two prompts' margins (0: forgotten, 1: as if nothing were
deleted), and `X.follow_rate`, the share of prompts that are decided by the value they had (0.5: forgotten).
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvprobe.figures.doses import Curve, Doses
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.removal.probe import Removal
from kvprobe.stats import Effect, Sample, joined

_ARMS = {
    "none": "nothing deleted",
    "gap": "deleted in place",
    "rotated": "deleted and closed up",
    "void": "said to be void",
    "rotated_void": "deleted and said to be void",
    "policy_too": "deleted with its rule",
    "recomputed": "all behind it run again",
    "other_line": "another line deleted",
}
_AGAIN = "rotated_then_{count}"


def effects(sample: Sample, _: Removal) -> Iterator[Effect]:
    """Leak and follow rate of every arm."""
    for arm, part in sample.by("arm"):
        if arm != "rotated_then":
            yield from _leaks(part, arm)
    for _count, part in sample.of(arm="rotated_then").by("count"):
        yield from _leaks(part, _AGAIN)


def names(probe: Removal) -> Iterator[str]:
    """Those of `effects`."""
    again = [_AGAIN.format(count=count) for count in probe.counts]
    yield from joined((*_ARMS, *again), ("leak", "follow_rate"))


def _leaks(sample: Sample, condition: str) -> Iterator[Effect]:
    rows = sample.rows
    yield sample.recovery(f"{condition}.leak", rows["margin_of_donor"] - rows["margin_of_base"])
    sides = [rows.assign(follows=rows[column]) for column in ("follows_base", "follows_donor")]
    yield sample.table(pd.concat(sides)).rate(f"{condition}.follow_rate", "follows")


READING = Reading(
    effects,
    FigureSpec(
        "A field is deleted from the cache: does the decision still follow it?",
        (
            Rates(
                _ARMS,
                (
                    Series("{arm}.leak", "leak (0: forgotten)", COLORS["vermilion"]),
                    Series("{arm}.follow_rate", "decided by the deleted value (0.5: forgotten)", COLORS["blue"], "s"),
                ),
                "share",
                3.4,
                levels=(0.0, 0.5, 1.0),
                xlim=(-0.2, 1.2),
            ),
            Doses(
                {Curve(_AGAIN, also=((0.0, "rotated.leak"),)): ("run again behind it", COLORS["vermilion"])},
                "leak",
                2.2,
                xlabel="tokens run again behind it",
                metric="leak",
            ),
        ),
        main=RatesByModel(
            {f"{arm}.leak": label for arm, label in _ARMS.items() if arm not in ("none", "other_line")},
            "A deleted field still decides",
            "leak (0: forgotten)",
            limits=(-0.5, 1.5),
            ylim=None,
        ),
    ),
    finding="After a field's entries are deleted in place, {gap.follow_rate} of the prompts are still decided by its "
    "value; with everything behind it run again, {recomputed.follow_rate} (0.5: forgotten).",
    names=names,
)
