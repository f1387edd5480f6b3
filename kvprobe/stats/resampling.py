"""Intervals of any statistic by leaving out or resampling whole clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from kvprobe.stats._clusters import DEFAULT, Array, Clusters, Labels, Summary
from kvprobe.stats.effects import RANGE, Effect
from kvprobe.stats.labels import Label
from kvprobe.stats.settings import StatisticsConfig

_BOOTSTRAP_FROM = 20


def bootstrapped(
    name: str | Label,
    rows: pd.DataFrame,
    statistic: Callable[[Any], float],
    *,
    of_sums: bool = False,
    clusters: Labels | None = None,
    statistics: StatisticsConfig = DEFAULT,
    noise_floor: float = 0.0,
    excluded: int = 0,
    unit: str = "fraction",
) -> Effect:
    """Any smooth statistic of the rows, resampled by cluster.

    From 20 clusters on scipy's BCa bootstrap, seeded by `statistics.seed`; below, where it covers too little,
    a delete-one-cluster jackknife with t (which needs a smooth statistic: not a median or a maximum).

    `statistic` goes from a table with the columns of `rows` to one number; with `of_sums` from the sums `[column]` of
    numeric rows, which is many times faster. Other arguments as in `kvprobe.stats.mean`.
    """
    if rows.empty:
        raise ValueError(f"{name}: no rows")
    groups = Clusters.of(clusters, len(rows))
    summary = Summary(name, groups, statistics, noise_floor, excluded, unit)
    members = [np.flatnonzero(groups.index == g) for g in range(groups.count)]

    sums = np.stack([rows.to_numpy(float)[own].sum(axis=0) for own in members]) if of_sums else None

    def of_clusters(chosen: Sequence[int] | NDArray[np.intp]) -> float:
        if sums is not None:
            return float(statistic(sums[np.asarray(chosen, dtype=np.intp)].sum(axis=0)))
        return float(statistic(rows.iloc[np.concatenate([members[int(g)] for g in chosen])]))

    estimate = of_clusters(range(groups.count)) if of_sums else float(statistic(rows))
    if groups.too_few(statistics):
        each = [of_clusters([g]) for g in range(groups.count)]
        ends = min(*each, estimate), max(*each, estimate)
        return summary.effect(estimate, ends, RANGE)
    left_out = _left_out(of_clusters, groups.count)
    if groups.count < _BOOTSTRAP_FROM:
        error = _jackknife_error(left_out)
        half = float(stats.t.ppf((1 + statistics.confidence) / 2, groups.count - 1)) * error
        spread = {"standard_error": error, "degrees_of_freedom": float(groups.count - 1)}
        return summary.effect(estimate, (estimate - half, estimate + half), "cluster jackknife t", spread)
    result = stats.bootstrap(
        (np.arange(groups.count),),
        of_clusters,
        vectorized=False,
        n_resamples=statistics.resamples,
        confidence_level=statistics.confidence,
        # BCa's acceleration is 0 / 0 when no cluster makes a difference.
        method="BCa" if np.ptp(left_out) > 0 else "percentile",
        rng=np.random.Generator(np.random.PCG64(statistics.seed)),
    ).confidence_interval
    ends = float(result.low), float(result.high)
    # A BCa interval need not hold the estimate when the statistic is skewed.
    ends = min(ends[0], estimate), max(ends[1], estimate)
    return summary.effect(estimate, ends, "cluster bootstrap", seed=statistics.seed)


def _left_out(of_clusters: Callable[[Sequence[int]], float], count: int) -> Array:
    """[cluster] the statistic without each cluster in turn."""
    return np.array([of_clusters([g for g in range(count) if g != out]) for out in range(count)])


def _jackknife_error(left_out: Array) -> float:
    count = len(left_out)
    return float(np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()))
