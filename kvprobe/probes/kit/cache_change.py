"""How far the caches of two aligned prompts lie apart."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.probes.base import Measurement
from kvprobe.tasks.context import Span


def change_by_layer(base: KVCache, donor: KVCache, regions: Mapping[str, Span]) -> list[Measurement]:
    """How far the caches of two aligned prompts lie apart, a row for each region that is not empty and each layer.

    `change_keys` and `change_values` are the largest absolute differences of an entry's channels,
    `relative_keys` and `relative_values` the norm of the difference over the norm of the base.
    """
    rows: list[Measurement] = []
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
