"""Agreement beyond chance of two series of answers (Cohen, 1960; critique G8)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import cohen_kappa_score, confusion_matrix

from kvprobe.stats._clusters import DEFAULT, Labels
from kvprobe.stats.effects import Effect
from kvprobe.stats.labels import Label
from kvprobe.stats.proportions import proportion
from kvprobe.stats.settings import StatisticsConfig


def cohen_kappa(
    name: str | Label,
    first: ArrayLike,
    second: ArrayLike,
    *,
    clusters: Labels | None = None,
    statistics: StatisticsConfig = DEFAULT,
    excluded: int = 0,
) -> Effect:
    """Cohen's kappa of two [row] series of answers: 1 for the same answers, 0 for as many as chance would give.

    Its interval is that of the observed agreement (`kvprobe.stats.proportion`), with the agreement by chance held at
    its estimate: never of zero width, even where all rows agree. The agreement itself and the one that chance would
    give are in `extra`. Other arguments as in `kvprobe.stats.mean`.

    Raises:
        ValueError: no rows, series of different length, or the same single answer throughout, for which kappa is
            undefined.
    """
    ours, theirs = np.asarray(first), np.asarray(second)
    if ours.shape != theirs.shape:
        raise ValueError(f"{name}: {ours.size} answers against {theirs.size}")
    observed = proportion(
        name, (ours == theirs).astype(float), clusters=clusters, statistics=statistics, excluded=excluded
    )
    labels = np.unique(np.concatenate([ours, theirs]))
    if len(labels) < 2:
        raise ValueError(f"{name}: all answers are the same one, so there is no agreement beyond chance to speak of")
    table = confusion_matrix(ours, theirs, labels=labels)
    chance = float((table.sum(0) * table.sum(1)).sum()) / len(ours) ** 2
    kappa = float(cohen_kappa_score(ours, theirs, labels=labels))
    ends = ((end - chance) / (1 - chance) for end in (observed.low, observed.high))
    low, high = (float(end) for end in ends)
    return Effect(
        label=Label.of(name),
        # Rounding may put an end on the wrong side of the estimate.
        estimate=kappa,
        low=min(low, kappa),
        high=max(high, kappa),
        n=observed.n,
        clusters=observed.clusters,
        excluded=excluded,
        unit="kappa",
        method=observed.method,
        confidence=statistics.confidence,
        extra={**observed.extra, "observed_agreement": observed.estimate, "chance_agreement": chance},
    )
