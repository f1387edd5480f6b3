"""How many clusters a claim needs before any sample could make it hold."""

from __future__ import annotations

import math
from functools import cache

from kvprobe.runs.claims.statement import Statement
from kvprobe.stats import Effect
from kvprobe.stats.proportions import EXACT_SHARE, WILSON, share_ends

_MOST = 2000


def is_share(effect: Effect) -> bool:
    """Whether it is a share of rows (not a kappa, whose interval is one of a share too)."""
    return effect.unit == "fraction" and effect.method in (WILSON, EXACT_SHARE)


def least_for_a_range(confidence: float) -> int:
    """Clusters whose range holds their median as surely: 1 - 2^(1 - G) of the time, whatever the distribution is."""
    return math.ceil(1 - math.log2(1 - confidence))


def clusters_needed(statement: Statement, effect: Effect) -> int | None:
    """The smallest number with which a share could satisfy a statement; `None` where this sample's number could.

    Also `None` where no number up to 2,000 could, and of effects that are no shares.
    """
    if not is_share(effect) or _attainable(statement, effect.clusters, effect.confidence):
        return None
    later = range(effect.clusters + 1, _MOST + 1)
    return next((size for size in later if _attainable(statement, size, effect.confidence)), None)


@cache
def _attainable(statement: Statement, size: int, confidence: float) -> bool:
    """Whether some count of successes has an interval that satisfies the statement."""
    # The narrowest intervals are those of a perfect score, where it satisfies the statement, else near its middle.
    lower, upper = max(statement.lower, 0.0), min(statement.upper, 1.0)
    middle = (lower + upper) / 2 * size
    counts = {0, size, *(min(max(round(middle) + step, 0), size) for step in (-1, 0, 1))}
    return any(statement.contains(*share_ends(count / size, size, confidence)) for count in counts)
