"""Estimators with intervals that cover: every one knows its clusters, its exclusions and its noise floor.

What covers was decided by simulation (tests/unit/test_stats_coverage.py), since most of our samples are small.

* Means and ratios of sums: Student's t on cluster totals with G - 1 degrees of freedom; for a ratio, Fieller's
  inversion of it, which is exact for normal residuals whatever the denominators are. Percentile and BCa
  bootstraps cover 0.84 at n = 5 and 0.90 at n = 10 where the t interval covers 0.95, and are not used there.
  For strongly skewed data (exponential) every method is short at small n: t covers 0.88 at 5, 0.91 at 10, 0.93
  at 40; the median, whose interval is distribution-free, is then the figure to read.
* Proportions: see `kvprobe.stats.proportions`.
* Any other statistic: scipy's BCa bootstrap over clusters from 20 clusters on, below that a delete-one-cluster
  jackknife with t.
* Fewer than `minimum_clusters` clusters that hold several rows each: no interval. `method` is `range`, low and
  high the smallest and largest cluster value. (Where every row is a cluster of its own, the rows are
  independent and n = 5 does get an interval.) Such a range covers the median over clusters with probability
  1 - 2^(1 - G) whatever the distribution, which verdicts use.
* Identical values: the sample spread says nothing about how exact the reading is, so no interval reaches less
  than the noise floor to either side of the estimate. A noise floor of 0 declares the reading exact.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

from kvprobe.stats._clusters import DEFAULT, Array, Clusters, Labels, Summary, finite_vector
from kvprobe.stats.effects import RANGE, Effect
from kvprobe.stats.labels import Label
from kvprobe.stats.settings import StatisticsConfig


def mean(
    name: str | Label,
    values: ArrayLike,
    *,
    clusters: Labels | None = None,
    statistics: StatisticsConfig = DEFAULT,
    noise_floor: float = 0.0,
    excluded: int = 0,
    unit: str = "fraction",
) -> Effect:
    """Mean over rows with a cluster t interval.

    The keyword arguments are those of all estimators of this module.

    Args:
        name: of the effect.
        values: [row], in `unit`.
        clusters: [row] label of the independent unit each row belongs to; `None`: rows are independent.
        statistics: confidence, smallest number of clusters, seed.
        noise_floor: of one reading, in `unit`.
        excluded: rows left out before, by a rule set before the run.
        unit: of the values and of the effect.

    Raises:
        ValueError: no rows, or a value that is not finite.
    """
    rows = finite_vector(name, values)
    groups = Clusters.of(clusters, len(rows))
    summary = Summary(name, groups, statistics, noise_floor, excluded, unit)
    return _ratio_effect(summary, rows, np.ones_like(rows), {"median": float(np.median(rows))})


def ratio_of_sums(
    name: str | Label,
    shift: ArrayLike,
    gap: ArrayLike,
    *,
    clusters: Labels | None = None,
    statistics: StatisticsConfig = DEFAULT,
    noise_floor: float = 0.0,
    excluded: int = 0,
    unit: str = "fraction",
) -> Effect:
    """`sum(shift) / sum(gap)`, the recovery, with Fieller's cluster t interval (critique G5).

    A single row with a tiny gap cannot dominate it, as it would the mean of ratios; that mean and the median
    ratio stand beside it in `extra` (`mean_of_ratios`, `median`).

    `shift` is [row] margin of the intervention minus margin of the base, `gap` [row] margin of the donor minus
    margin of the base, both in logits. `noise_floor` is that of one shift, in logits; the effect carries it
    divided by the mean absolute gap. Other arguments as in `mean`.

    Raises:
        ValueError: the gaps sum to zero, or no rows are given.
    """
    shifts, gaps = finite_vector(name, shift), finite_vector(name, gap)
    if len(shifts) != len(gaps):
        raise ValueError(f"{name}: {len(shifts)} shifts for {len(gaps)} gaps")
    if gaps.sum() == 0:
        raise ValueError(f"{name}: the gaps sum to zero, so there is nothing to recover")
    groups = Clusters.of(clusters, len(shifts))
    extra: dict[str, float] = {"ratio_of_sums": float(shifts.sum() / gaps.sum())}
    if (gaps != 0).all():
        ratios = shifts / gaps
        extra |= {"mean_of_ratios": float(ratios.mean()), "median": float(np.median(ratios))}
    floor = noise_floor / float(np.abs(gaps).mean())
    summary = Summary(name, groups, statistics, floor, excluded, unit)
    return _ratio_effect(summary, shifts, gaps, extra)


def mean_of_ratios(
    name: str | Label,
    shift: ArrayLike,
    gap: ArrayLike,
    *,
    clusters: Labels | None = None,
    statistics: StatisticsConfig = DEFAULT,
    noise_floor: float = 0.0,
    excluded: int = 0,
    unit: str = "fraction",
) -> Effect:
    """Mean over rows of `shift / gap`: the paper's estimator, for comparison with `ratio_of_sums`.

    Arguments as in `ratio_of_sums`. Raises ValueError when a gap is zero.
    """
    shifts, gaps = finite_vector(name, shift), finite_vector(name, gap)
    if (gaps == 0).any():
        raise ValueError(f"{name}: a gap is zero; exclude such rows by a rule set before the run")
    return mean(
        name,
        shifts / gaps,
        clusters=clusters,
        statistics=statistics,
        noise_floor=noise_floor / float(np.abs(gaps).mean()),
        excluded=excluded,
        unit=unit,
    )


def median(
    name: str | Label,
    values: ArrayLike,
    *,
    clusters: Labels | None = None,
    statistics: StatisticsConfig = DEFAULT,
    noise_floor: float = 0.0,
    excluded: int = 0,
    unit: str = "fraction",
) -> Effect:
    """Median over clusters of the median within each, with a distribution-free order-statistics interval.

    With five values or fewer no such interval reaches 95%; the range is given instead.
    Arguments as in `mean`.
    """
    rows = finite_vector(name, values)
    groups = Clusters.of(clusters, len(rows))
    centres = pd.Series(rows).groupby(groups.index).median().to_numpy(dtype=float)
    low, high, method = float(centres.min()), float(centres.max()), RANGE
    if not groups.too_few(statistics):
        test = stats.quantile_test(centres, q=float(np.median(centres)), p=0.5)
        interval = test.confidence_interval(confidence_level=statistics.confidence)
        if np.isfinite([interval.low, interval.high]).all():
            low, high, method = float(interval.low), float(interval.high), "order statistics"
    summary = Summary(name, groups, statistics, noise_floor, excluded, unit)
    return summary.effect(float(np.median(centres)), (low, high), method, {"mean": float(rows.mean())})


def maximum(
    name: str | Label,
    values: ArrayLike,
    *,
    clusters: Labels | None = None,
    statistics: StatisticsConfig = DEFAULT,
    noise_floor: float = 0.0,
    excluded: int = 0,
    unit: str = "logits",
) -> Effect:
    """The largest of all rows: for identities that must hold in every one, such as a change of exactly 0.

    It describes these rows and infers nothing, so `low` and `high` are the value itself (`method` is `exact`).
    """
    rows = finite_vector(name, values)
    groups = Clusters.of(clusters, len(rows))
    top = float(rows.max())
    summary = Summary(name, groups, statistics, noise_floor, excluded, unit)
    return summary.effect(top, (top, top), "exact", {"mean": float(rows.mean())})


def _ratio_effect(summary: Summary, numerator: Array, denominator: Array, extra: dict[str, float]) -> Effect:
    groups, confidence = summary.groups, summary.statistics.confidence
    tops, bottoms = groups.sums(numerator), groups.sums(denominator)
    estimate = float(tops.sum() / bottoms.sum())
    if groups.too_few(summary.statistics):
        usable = bottoms != 0
        each = tops[usable] / bottoms[usable]
        ends = min(float(each.min()), estimate), max(float(each.max()), estimate)
        return summary.effect(estimate, ends, RANGE, extra)
    ends = _fieller(tops, bottoms, confidence)
    # Rounding may put an end of a zero-width interval on the wrong side of the estimate.
    ends = min(ends[0], estimate), max(ends[1], estimate)
    residuals = tops - estimate * bottoms
    error = float(np.sqrt(groups.count) * residuals.std(ddof=1) / abs(bottoms.sum()))
    extra = {**extra, "standard_error": error, "degrees_of_freedom": float(groups.count - 1)}
    return summary.effect(estimate, ends, "cluster t", extra)


def _fieller(tops: Array, bottoms: Array, confidence: float) -> tuple[float, float]:
    """All ratios r for which the cluster totals `tops - r * bottoms` have a mean that t does not reject as 0.

    Fieller (1954). Unbounded when the data do not even tell the denominator from 0.
    """
    count = len(tops)
    scale_top, scale_bottom = float(np.abs(tops).max()) or 1.0, float(np.abs(bottoms).max())
    tops, bottoms = tops / scale_top, bottoms / scale_bottom
    t_squared = float(stats.t.ppf((1 + confidence) / 2, count - 1)) ** 2
    top, bottom = float(tops.mean()), float(bottoms.mean())
    covariance = np.cov(tops, bottoms) / count
    a = bottom**2 - t_squared * covariance[1, 1]
    b = top * bottom - t_squared * covariance[0, 1]
    c = top**2 - t_squared * covariance[0, 0]
    if a <= 0:
        return -np.inf, np.inf
    half = np.sqrt(max(b * b - a * c, 0.0))
    ends = np.array([(b - half) / a, (b + half) / a]) * (scale_top / scale_bottom)
    return float(ends[0]), float(ends[1])
