"""Shares with their intervals: Wilson's, exact where all rows agree, at an effective size where rows are clustered.

A perfect score can err to one side only, so its bound is the exact one-sided one of Clopper and Pearson: after n of n
the share is at least `(1 - confidence) ** (1 / n)`, where n counts clusters, since rows that all agree say nothing
about how alike those of one cluster are. No other sample of the same clusters is told as better than a perfect one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from kvprobe.stats._clusters import DEFAULT, Array, Clusters, Labels, Summary, finite_vector
from kvprobe.stats.effects import Effect
from kvprobe.stats.labels import Label
from kvprobe.stats.settings import StatisticsConfig

WILSON, EXACT_SHARE = "wilson", "exact binomial"
"""How the interval of a share was made; the second of a perfect score."""


def proportion(
    name: str | Label,
    successes: ArrayLike,
    *,
    clusters: Labels | None = None,
    statistics: StatisticsConfig = DEFAULT,
    excluded: int = 0,
    unit: str = "fraction",
) -> Effect:
    """Share of successes with a Wilson interval, or an exact bound for a perfect score (all rows or none).

    With clusters the interval is Wilson's at the effective sample size of Korn and Graubard (1998), where the
    design effect is taken as at least 1. With too few clusters every cluster counts as one observation. Never of
    zero width.

    `successes` is [row] of booleans or of 0 and 1. Other arguments as in `kvprobe.stats.mean`.
    """
    rows = finite_vector(name, np.asarray(successes, dtype=float))
    groups = Clusters.of(clusters, len(rows))
    share = float(rows.mean())
    perfect = share in (0.0, 1.0)
    size = float(groups.count) if perfect else _effective_size(rows, groups, statistics)
    summary = Summary(name, groups, statistics, 0.0, excluded, unit)
    ends = share_ends(share, size, statistics.confidence)
    return summary.effect(share, ends, EXACT_SHARE if perfect else WILSON, {"effective_n": size})


def share_ends(share: float, size: float, confidence: float) -> tuple[float, float]:
    """The interval of a share of `size` independent observations."""
    if share in (0.0, 1.0):
        bound = perfect_bound(size, confidence)
        return (bound, 1.0) if share else (0.0, 1 - bound)
    low, high = proportion_confint(share * size, size, alpha=1 - confidence, method="wilson")
    # Rounding may put an end on the wrong side of the share.
    return min(float(low), share), max(float(high), share)


def perfect_bound(size: float, confidence: float) -> float:
    """The least share that a perfect score of `size` independent observations leaves possible."""
    return float((1 - confidence) ** (1 / size))


def _effective_size(rows: Array, groups: Clusters, statistics: StatisticsConfig) -> float:
    n, count = len(rows), groups.count
    if count == n:
        return float(n)
    share = float(rows.mean())
    # No more than leaves Wilson's ends within those of a perfect score of the same clusters.
    best, level = perfect_bound(count, statistics.confidence), (1 + statistics.confidence) / 2
    most = [_size_that_ends_at(best, side, level) for side in (share, 1 - share) if side > best]
    if groups.too_few(statistics):
        return min([float(count), *most])
    residuals = groups.sums(rows) - share * groups.sizes()
    variance = count / (count - 1) * float((residuals**2).sum()) / n**2
    design_effect = max(variance * n / (share * (1 - share)), 1.0)
    # The variance is itself estimated from few clusters: t in place of the normal quantile.
    few = float(stats.norm.ppf(level) / stats.t.ppf(level, count - 1)) ** 2
    return min([n / design_effect * few, *most])


def _size_that_ends_at(low: float, share: float, level: float) -> float:
    """The size at which Wilson's interval of a share begins at `low`."""
    return float(stats.norm.ppf(level)) ** 2 * low * (1 - low) / (share - low) ** 2
