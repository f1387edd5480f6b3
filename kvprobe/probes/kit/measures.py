"""What several probes measure: effects of an edited decision, and how far two caches lie apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.stats import Effect, StatisticsConfig, maximum, mean, proportion, ratio_of_sums
from kvprobe.tasks.context import Span


def pair_noise(rows: pd.DataFrame, statistics: StatisticsConfig) -> Effect:
    """`noise.margin`: the largest noise floor of any pair, in logits; `n` are pairs, however many rows each has."""
    once = rows.groupby("pair")[["noise_floor", statistics.cluster]].first()
    return maximum("noise.margin", once["noise_floor"], clusters=once[statistics.cluster])


def decision_effects(rows: pd.DataFrame, statistics: StatisticsConfig, noise_floor: float) -> list[Effect]:
    """Effects of one intervention on the decision.

    `X.recovery` (ratio of sums; `median` and `mean_of_ratios` in its `extra`), `X.margin_shift` (logits), and
    `X.flip_rate` (share of decisions that change).

    Args:
        rows: `intervention` (the same in all), `margin`, `m_base`, `m_donor` (logits), `flipped`, cluster column.
        statistics: of the experiment.
        noise_floor: of one margin, in logits.
    """
    name = rows["intervention"].iloc[0]
    shift, gap = rows["margin"] - rows["m_base"], rows["m_donor"] - rows["m_base"]
    shared: dict[str, Any] = {"clusters": rows[statistics.cluster], "statistics": statistics}
    return [
        ratio_of_sums(f"{name}.recovery", shift, gap, noise_floor=noise_floor, **shared),
        mean(f"{name}.margin_shift", shift, noise_floor=noise_floor, unit="logits", **shared),
        proportion(f"{name}.flip_rate", rows["flipped"].astype(float), **shared),
    ]


def over_draws(rows: pd.DataFrame, statistics: StatisticsConfig) -> pd.DataFrame:
    """One row for each pair (and direction, where there are two): margins and flips as means over its draws."""
    keys = [key for key in ("pair", "direction", "intervention", statistics.cluster) if key in rows]
    values = ["margin", "m_base", "m_donor", "flipped"]
    numbers = rows.assign(flipped=rows["flipped"].astype(float))
    return numbers.groupby(keys, sort=False)[values].mean().reset_index()


def shapley_split(
    decisions: pd.DataFrame,
    interventions: Sequence[str],
    parts: tuple[str, str],
    statistics: StatisticsConfig,
    noise_floor: float,
) -> list[Effect]:
    """How two parts of an intervention share its effect (critique ME1).

    `interaction.recovery` is what the parts do together beyond what each does alone; `shapley_X.recovery` is the
    mean of what part X adds to nothing and to the other part. The two Shapley values add up to the whole.

    Args:
        decisions: as in `decision_effects`, with a row for each `pair` and each intervention.
        interventions: names of the first part's, the second part's and the whole's.
        parts: what the two parts are called.
        statistics: of the experiment.
        noise_floor: of one margin, in logits.
    """
    margin = decisions.pivot(index="pair", columns="intervention", values="margin")
    pairs = decisions.groupby("pair").first().loc[margin.index]
    first, second, both = (margin[name] - pairs["m_base"] for name in interventions)
    shares = {
        "interaction": both - first - second,
        f"shapley_{parts[0]}": (first + (both - second)) / 2,
        f"shapley_{parts[1]}": (second + (both - first)) / 2,
    }
    gap, clusters = pairs["m_donor"] - pairs["m_base"], pairs[statistics.cluster]
    return [
        ratio_of_sums(f"{name}.recovery", shift, gap, clusters=clusters, statistics=statistics, noise_floor=noise_floor)
        for name, shift in shares.items()
    ]


def change_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """`blast_radius.X` (largest absolute change of all) and `relative_change.X` (mean) for each region X.

    `rows` are those of `change_by_layer`, with the cluster column.
    """
    effects = []
    for region, part in rows.groupby("region", sort=False):
        largest = part[["change_keys", "change_values"]].max(axis=1)
        relative = part[["relative_keys", "relative_values"]].mean(axis=1)
        clusters = part[statistics.cluster]
        effects.append(maximum(f"blast_radius.{region}", largest, clusters=clusters, unit="activation"))
        effects.append(mean(f"relative_change.{region}", relative, clusters=clusters, statistics=statistics))
    return effects


def change_by_layer(base: KVCache, donor: KVCache, regions: Mapping[str, Span]) -> list[dict[str, Any]]:
    """How far the caches of two aligned prompts lie apart, a row for each region that is not empty and each layer.

    `change_keys` and `change_values` are the largest absolute differences of an entry's channels,
    `relative_keys` and `relative_values` the norm of the difference over the norm of the base.
    """
    rows: list[dict[str, Any]] = []
    for region, span in regions.items():
        if not len(span):
            continue
        ours, theirs = (cache.take(cache.index_of(list(span.positions))) for cache in (base, donor))
        for number, (mine, other) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
            keys, values = _change(mine.keys, other.keys), _change(mine.values, other.values)
            rows.append(
                {
                    "measurement": "cache_change",
                    "region": region,
                    "layer": number,
                    "change_keys": keys[0],
                    "change_values": values[0],
                    "relative_keys": keys[1],
                    "relative_values": values[1],
                }
            )
    return rows


def _change(mine: Tensor, other: Tensor) -> tuple[float, float]:
    mine, other = mine.float(), other.float()
    difference = mine - other
    return float(difference.abs().max()), float(difference.norm() / mine.norm().clamp_min(1e-12))
