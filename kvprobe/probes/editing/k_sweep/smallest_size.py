"""K*: the smallest number of recomputed tokens that decides correctly about as often as an erratum (critique ED5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from kvprobe.stats import Effect, Label, Sample, bootstrapped
from kvprobe.stats.effects import RANGE


def against_reference(both: Sample, criterion: str, reference: str, margin: float) -> Iterator[Effect]:
    """Fitted differences of a criterion from a reference arm, and K* from them."""
    swept, fixed = (both.rows[both.rows["criterion"] == name] for name in (criterion, reference))
    if swept.empty or fixed.empty:
        return
    decided = swept.assign(correct=swept["correct"].astype(float)).pivot(index="pair", columns="size", values="correct")
    sizes = [int(size) for size in decided.columns]
    decided["reference"] = fixed.set_index("pair")["correct"].astype(float)
    decided["pairs"] = 1.0
    pairs = both.table(swept).per("pair", after_field="first")
    clusters, statistics = pairs.clusters.loc[decided.index], both.statistics
    # Clusters that all agree have no spread and could still hide a difference: the rule of three, exactly.
    hidden = 1 - (1 - statistics.confidence) ** (1 / clusters.nunique())
    shared: dict[str, Any] = {"clusters": clusters, "statistics": statistics, "noise_floor": hidden}
    differences = []
    for place, size in enumerate(sizes):
        label = both.named(size=size).label(f"{criterion}_{{size}}.over_{reference}.difference")
        differences.append(both.made(bootstrapped(label, decided, _fitted_difference(place), of_sums=True, **shared)))
    yield from differences
    everything = max(float(pairs.rows["after_field"].mean()), sizes[-1])
    label = both.label(f"{criterion}.k_star_{reference}")
    yield both.made(smallest_within(label, sizes, differences, -margin, everything))


def monotone(rates: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """`[size]` shares made non-decreasing by least squares (isotonic regression), each size with equal weight."""
    return np.asarray(isotonic_regression(np.asarray(rates, dtype=float)).x, dtype=float)


def smallest_within(
    label: Label, sizes: Sequence[int], differences: Sequence[Effect], margin: float, everything: float
) -> Effect:
    """The smallest size whose difference is at least `margin`, with the interval that inverts the differences'.

    Args:
        label: of the effect.
        sizes: increasing.
        differences: of each size from the reference, with their intervals.
        margin: the least difference that counts as none, below 0.
        everything: the size that stands in where none is enough: all tokens there are.
    """

    def first(value: Callable[[Effect], float]) -> float:
        enough = (s for s, each in zip(sizes, differences, strict=True) if value(each) >= margin)
        return float(next(enough, everything))

    ranged = any(each.is_range for each in differences)
    return Effect(
        label=label,
        estimate=first(lambda each: each.estimate),
        low=first(lambda each: each.high),
        high=first(lambda each: each.low),
        n=differences[0].n,
        clusters=differences[0].clusters,
        unit="tokens",
        method=RANGE if ranged else "inverted cluster bootstrap",
        seed=differences[0].seed,
        confidence=differences[0].confidence,
    )


def _fitted_difference(place: int) -> Callable[[NDArray[np.float64]], float]:
    """The fit at size number `place` less the reference, from the sums of the sizes, the reference and the pairs."""

    def difference(sums: NDArray[np.float64]) -> float:
        *rates, reference = sums[:-1] / sums[-1]
        return float(monotone(rates)[place] - reference)

    return difference
