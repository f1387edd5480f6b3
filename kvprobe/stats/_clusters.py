"""Rows grouped into independent clusters, and the frame that every effect is made in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kvprobe.stats.effects import Effect
from kvprobe.stats.labels import Label
from kvprobe.stats.settings import StatisticsConfig

Array = NDArray[np.float64]
Labels = Sequence[Any] | pd.Series | NDArray[Any]

DEFAULT = StatisticsConfig()


@dataclass(frozen=True)
class Clusters:
    """Rows grouped by label: `index[row]` is the cluster of a row."""

    index: NDArray[np.intp]
    count: int

    @classmethod
    def of(cls, labels: Labels | None, n: int) -> Clusters:
        """[row] labels as clusters; without labels every row is its own."""
        if labels is None:
            return cls(np.arange(n), n)
        codes, unique = pd.factorize(pd.Series(list(labels), dtype=object), sort=False)
        if len(codes) != n:
            raise ValueError(f"{len(codes)} cluster labels for {n} rows")
        if (codes < 0).any():
            raise ValueError("a cluster label is missing")
        return cls(codes, len(unique))

    def sums(self, values: Array) -> Array:
        """[cluster] sum of the [row] values."""
        return np.bincount(self.index, weights=values, minlength=self.count).astype(np.float64)

    def sizes(self) -> Array:
        """[cluster] number of rows."""
        return self.sums(np.ones(len(self.index)))

    def too_few(self, statistics: StatisticsConfig) -> bool:
        """Whether only a range can be given."""
        return self.count < 2 or (self.count < len(self.index) and self.count < statistics.minimum_clusters)


@dataclass(frozen=True)
class Summary:
    """All of an effect but its numbers."""

    name: str | Label
    groups: Clusters
    statistics: StatisticsConfig
    noise_floor: float
    excluded: int
    unit: str

    def effect(
        self,
        estimate: float,
        ends: tuple[float, float],
        method: str,
        extra: dict[str, float] | None = None,
        *,
        seed: int | None = None,
    ) -> Effect:
        """The effect; its ends are at least the noise floor away from the estimate."""
        return Effect(
            label=Label.of(self.name),
            estimate=estimate,
            low=min(ends[0], estimate - self.noise_floor),
            high=max(ends[1], estimate + self.noise_floor),
            n=len(self.groups.index),
            clusters=self.groups.count,
            excluded=self.excluded,
            noise_floor=self.noise_floor,
            unit=self.unit,
            method=method,
            seed=seed,
            confidence=self.statistics.confidence,
            extra=extra or {},
        )


def finite_vector(name: str | Label, values: ArrayLike) -> Array:
    """The values as one vector of finite numbers; ValueError names the effect otherwise."""
    rows = np.asarray(values, dtype=float).reshape(-1)
    if not len(rows):
        raise ValueError(f"{name}: no rows")
    if not np.isfinite(rows).all():
        raise ValueError(f"{name}: a value is not finite")
    return rows
