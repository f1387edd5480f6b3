"""How fast a cost grows: the exponent of a power law with its interval."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from kvprobe.stats.effects import Effect
from kvprobe.stats.labels import Label
from kvprobe.stats.settings import StatisticsConfig


def growth_exponent(
    name: str | Label,
    sizes: ArrayLike,
    costs: ArrayLike,
    *,
    statistics: StatisticsConfig,
    excluded: int = 0,
) -> Effect:
    """The slope of log cost on log size by ordinary least squares, with Student's t interval of n - 2 degrees.

    For a cost that is a sum of powers it is the average slope over the sizes that were measured, no limit. Of a ratio
    of two costs it is the difference of their exponents.

    Args:
        name: of the effect.
        sizes: [row], positive, at least two different ones.
        costs: [row], positive.
        statistics: of the experiment; its confidence is used.
        excluded: rows left out before.

    Raises:
        ValueError: fewer than three rows, fewer than two sizes, or a value that is not positive.
    """
    across, up = np.asarray(sizes, dtype=float), np.asarray(costs, dtype=float)
    if len(across) < 3 or len(np.unique(across)) < 2 or (across <= 0).any() or (up <= 0).any():
        raise ValueError(f"{name}: an exponent needs three positive rows of at least two sizes")
    x, y = np.log(across), np.log(up)
    x, y = x - x.mean(), y - y.mean()
    slope = float((x @ y) / (x @ x))
    residual = y - slope * x
    error = float(np.sqrt((residual @ residual) / (len(x) - 2) / (x @ x)))
    half = float(stats.t.ppf((1 + statistics.confidence) / 2, len(x) - 2)) * error
    return Effect(
        Label.of(name),
        slope,
        slope - half,
        slope + half,
        n=len(across),
        clusters=len(across),
        excluded=excluded,
        unit="exponent",
        method="least squares t",
        confidence=statistics.confidence,
        extra={"standard_error": error, "degrees_of_freedom": float(len(x) - 2)},
    )
