"""A key-value cache in 8-bit integers.

Keys are quantised per channel and values per token, as their outliers lie (KIVI, Liu et al. 2024, arXiv:2402.02750).
What is quantised are the keys as the model first computed them: a moved cache is rotated after it is restored, so that
moving costs no second rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.errors import UnsupportedError
from kvprobe.models.subject import Subject

_LARGEST = 127


@dataclass(frozen=True, eq=False)
class Integers:
    """A tensor as `codes` (int8) times `scale`, which has size 1 along the axis it is shared over."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor, axis: int) -> Integers:
        """The nearest codes, symmetric about 0, the largest magnitude along `axis` being 127."""
        exact = values.to(torch.promote_types(values.dtype, torch.float32))
        scale = exact.abs().amax(axis, keepdim=True) / _LARGEST
        # A channel of zeros has no scale and needs none.
        codes = (exact / torch.where(scale > 0, scale, 1)).round().to(torch.int8)
        return cls(codes, scale)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype`, each number within half a scale of what it was."""
        return (self.codes * self.scale).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.codes, self.scale))


@dataclass(frozen=True, eq=False)
class QuantisedCache:
    """A cache at rest: source keys and values of each layer as integers, and where its entries stand.

    `keys` `[batch, kv_head, position, head_dim]` have one scale per row, head and channel, `values` one per row, head
    and token.
    """

    keys: tuple[Integers, ...]
    values: tuple[Integers, ...]
    positions: Tensor
    source_positions: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales."""
        return sum(part.nbytes for part in (*self.keys, *self.values))

    def restored(self, subject: Subject) -> KVCache:
        """The cache to run on; moved entries are rotated from their restored source keys.

        Raises:
            UnsupportedError: entries were moved and the RoPE scaling does not allow it.
        """
        turn = self.positions - self.source_positions
        tables = subject.architecture.rotary(subject.model) if bool(turn.any()) else (None,) * len(self.keys)
        layers = []
        for stored, values, table in zip(self.keys, self.values, tables, strict=True):
            source = stored.restored(self.dtype)
            keys = source if table is None else table.rotate(source, turn)
            layers.append(LayerKV(keys, values.restored(self.dtype), source))
        return KVCache(tuple(layers), self.positions, self.source_positions)


def quantise(cache: KVCache) -> QuantisedCache:
    """`cache` in 8-bit integers.

    Raises:
        UnsupportedError: the cache has axes of M-RoPE or no entry.
    """
    if cache.axes is not None or not len(cache):
        raise UnsupportedError("Only a filled cache of text is quantised: entries on the axes of M-RoPE are not.")
    return QuantisedCache(
        tuple(Integers.of(layer.source_keys, 2) for layer in cache.layers),
        tuple(Integers.of(layer.values, 3) for layer in cache.layers),
        cache.positions,
        cache.source_positions,
        cache.layers[0].keys.dtype,
    )
