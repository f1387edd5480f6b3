"""Tests that go with claims: paired, equivalence, and their adjustment for multiplicity (protocol 0.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from kvprobe.stats._clusters import Labels


@dataclass(frozen=True)
class TestResult:
    """Outcome of one test: `statistic` and `p_value` of `method` on `n` independent units."""

    __test__ = False  # not a pytest class

    method: str
    statistic: float
    p_value: float
    n: int


def mcnemar_exact(first: ArrayLike, second: ArrayLike) -> TestResult:
    """Exact McNemar test of two paired yes/no outcomes; `n` counts the discordant pairs.

    Args:
        first: [pair] of booleans.
        second: [pair] of booleans.
    """
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if a.shape != b.shape:
        raise ValueError(f"{a.size} outcomes against {b.size}")
    table = [[int((a & b).sum()), int((a & ~b).sum())], [int((~a & b).sum()), int((~a & ~b).sum())]]
    result = mcnemar(table, exact=True)
    discordant = table[0][1] + table[1][0]
    return TestResult("McNemar exact", float(result.statistic), min(float(result.pvalue), 1.0), discordant)


def equivalent(differences: ArrayLike, margin: float, *, clusters: Labels | None = None) -> TestResult:
    """Two one-sided t tests that the mean paired difference lies within `margin` of 0, on cluster means.

    Args:
        differences: [row] paired differences, in the unit of `margin`.
        margin: largest mean difference that counts as none.
        clusters: [row] labels; `None`: rows are independent.
    """
    rows = np.asarray(differences, dtype=float)
    if clusters is not None:
        rows = pd.Series(rows).groupby(list(clusters), sort=False).mean().to_numpy(dtype=float)
    if len(rows) < 2:
        raise ValueError("an equivalence test needs two clusters or more")
    lower = stats.ttest_1samp(rows, -margin, alternative="greater")
    upper = stats.ttest_1samp(rows, margin, alternative="less")
    binding = lower if lower.pvalue >= upper.pvalue else upper
    return TestResult("TOST", float(binding.statistic), float(binding.pvalue), len(rows))


def adjust_benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values for the false discovery rate, in the order given."""
    return _adjust(p_values, "fdr_bh")


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values for the family-wise error by Holm's method, in the order given."""
    return _adjust(p_values, "holm")


def _adjust(p_values: Sequence[float], method: str) -> list[float]:
    return [float(p) for p in multipletests(list(p_values), method=method)[1]] if len(p_values) else []
