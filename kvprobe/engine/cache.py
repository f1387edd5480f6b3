"""The immutable key-value cache every intervention works on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from kvprobe.errors import UnsupportedError
from kvprobe.viewing import Viewable


@dataclass(frozen=True, eq=False)
class LayerKV:
    """Keys and values of one layer, each `[batch, kv_head, position, head_dim]`, post-RoPE as the model caches them.

    `source_keys` are the keys as the model first computed them; they differ from `keys` only after a
    repositioning, so that a later one starts from the original and rounding never accumulates.
    """

    keys: Tensor
    values: Tensor
    source_keys: Tensor

    @classmethod
    def computed(cls, keys: Tensor, values: Tensor) -> LayerKV:
        """A layer as the model computed it."""
        return cls(keys, values, keys)

    def take(self, index: Tensor | slice) -> LayerKV:
        """The entries at `index`, in that order; a slice shares storage."""
        keys = _take(self.keys, index)
        source = keys if self.source_keys is self.keys else _take(self.source_keys, index)
        return LayerKV(keys, _take(self.values, index), source)

    def put(self, index: Tensor, other: LayerKV) -> LayerKV:
        """A copy with the entries at `index` replaced by all entries of `other`."""
        keys = _put(self.keys, index, other.keys)
        shared = self.source_keys is self.keys and other.source_keys is other.keys
        source = keys if shared else _put(self.source_keys, index, other.source_keys)
        return LayerKV(keys, _put(self.values, index, other.values), source)

    @staticmethod
    def join(parts: Sequence[LayerKV]) -> LayerKV:
        """The entries of all parts, one after the other."""
        keys = torch.cat([part.keys for part in parts], dim=2)
        values = torch.cat([part.values for part in parts], dim=2)
        if all(part.source_keys is part.keys for part in parts):
            return LayerKV.computed(keys, values)
        return LayerKV(keys, values, torch.cat([part.source_keys for part in parts], dim=2))


@dataclass(frozen=True, eq=False)
class KVCache(Viewable):
    """Keys and values of all layers with the position of every entry.

    Attributes:
        layers: one `LayerKV` per decoder layer.
        positions: int64 `[position]` on the CPU: the position each key is rotated to.
        source_positions: int64 `[position]`: the position its source key was computed at.
        axes: int64 `[3, position]`: under M-RoPE with images, the temporal, height and width position that each key
            is rotated to; `positions` then are the entry's place in the prompt. None where all three are `positions`.
        source_axes: int64 `[3, position]`: those its source key was computed at; None exactly when `axes` is.

    All tensors are to be treated as read-only: operations return new caches and never write into old ones.

    Raises:
        UnsupportedError: the layers differ in batch or length, or do not fit the positions or axes.
    """

    layers: tuple[LayerKV, ...]
    positions: Tensor
    source_positions: Tensor
    axes: Tensor | None = None
    source_axes: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.axes is None) != (self.source_axes is None):
            raise UnsupportedError("A cache needs both the axes of its keys and those of their sources, or neither.")
        for axes in (self.axes, self.source_axes):
            if axes is not None and axes.shape != (3, len(self.positions)):
                raise UnsupportedError(f"Axes {list(axes.shape)} do not fit {len(self.positions)} positions.")
        for number, layer in enumerate(self.layers):
            if layer.keys.ndim != 4 or layer.keys.shape[:3] != layer.values.shape[:3]:
                raise UnsupportedError(
                    f"Layer {number} holds keys {list(layer.keys.shape)} and values {list(layer.values.shape)}; both "
                    "must be [batch, kv_head, position, head_dim]."
                )
            if layer.keys.shape[2] != len(self.positions) or layer.keys.shape[0] != self.layers[0].keys.shape[0]:
                raise UnsupportedError(
                    f"Layer {number} holds {layer.keys.shape[2]} entries for {len(self.positions)} positions: the "
                    "cache was truncated or its layers come from different prompts."
                )

    @classmethod
    def computed(
        cls, layers: Iterable[tuple[Tensor, Tensor]], positions: Tensor, axes: Tensor | None = None
    ) -> KVCache:
        """A cache of `(keys, values)` just as a model computed them at `positions`, or at `axes`."""
        positions = positions.to("cpu", torch.long)
        axes = None if axes is None else axes.to("cpu", torch.long)
        made = tuple(LayerKV.computed(keys, values) for keys, values in layers)
        return cls(made, positions, positions, axes, axes)

    @classmethod
    def from_hugging_face(
        cls, past: Any, positions: Sequence[int] | Tensor | None = None, axes: Tensor | None = None
    ) -> KVCache:
        """The entries of a Hugging Face `DynamicCache`, from position 0 on unless told.

        Raises:
            UnsupportedError: the cache is empty, not dynamic, or a sliding layer has thrown entries away.
        """
        from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

        # A layer of both kinds is a DynamicLayer too: its recurrent state would be lost without a word.
        recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in past.layers)
        if recurrent or not past.layers or not all(isinstance(layer, DynamicLayer) for layer in past.layers):
            kinds = sorted({type(layer).__name__ for layer in past.layers}) or ["no layers"]
            raise UnsupportedError(
                f"Only a filled DynamicCache of attention layers converts to a KVCache, not {', '.join(kinds)}."
            )
        lengths = [0 if layer.keys is None else layer.keys.shape[-2] for layer in past.layers]
        for number, (layer, held) in enumerate(zip(past.layers, lengths, strict=True)):
            reported = layer.get_seq_length()
            if held != reported or held != max(lengths):
                raise UnsupportedError(
                    f"Layer {number} of the Hugging Face cache reports {reported} tokens and holds {held} of "
                    f"{max(lengths)}: a sliding window has truncated it; build the cache with DynamicCache() without "
                    "a config."
                )
        if not lengths[0]:
            raise UnsupportedError("The Hugging Face cache is empty; run a forward pass that fills it first.")
        places = torch.arange(lengths[0]) if positions is None else torch.as_tensor(positions)
        return cls.computed(((layer.keys, layer.values) for layer in past.layers), places, axes)

    def to_hugging_face(self) -> Any:
        """A `DynamicCache` of full layers only, sharing storage with this cache.

        Its layers grow by concatenation, so a forward pass on it leaves this cache as it is.
        """
        from transformers.cache_utils import DynamicCache, DynamicLayer

        past, new_layer = DynamicCache(), cast(Any, DynamicLayer)
        for layer in self.layers:
            full = new_layer()
            full.lazy_initialization(layer.keys, layer.values)
            full.keys, full.values = layer.keys, layer.values
            past.layers.append(full)
        return past

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.layers[0].keys.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, originals of moved keys not counted."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))

    def describe(self) -> dict[str, str]:
        """What it holds, in words, for its look in a notebook."""
        places = self.positions
        moved = int((self.positions != self.source_positions).sum())
        stretch = f", {int(places.min())} to {int(places.max())}" if len(places) else ""
        told = {
            "layers": str(len(self.layers)),
            "positions": f"{len(places)}{stretch}{f', {moved} of them moved' if moved else ''}",
        }
        if not self.layers:
            return told
        keys = self.layers[0].keys
        return {
            **told,
            "keys": f"{list(keys.shape)} (batch, kv_head, position, head_dim)",
            "dtype": f"{str(keys.dtype).removeprefix('torch.')} on {keys.device}",
        }

    def __repr__(self) -> str:
        told = "; ".join(f"{name} {value}" for name, value in self.describe().items())
        return f"KVCache({told}; {self.nbytes} bytes)"

    @property
    def triples(self) -> Tensor:
        """`[3, position]`: the position each key is rotated to on each axis, equal where the cache has no axes."""
        return self.positions.expand(3, -1) if self.axes is None else self.axes

    @property
    def source_triples(self) -> Tensor:
        """`[3, position]`: the position each source key was computed at on each axis."""
        return self.source_positions.expand(3, -1) if self.source_axes is None else self.source_axes

    def text_axes(self, positions: Tensor) -> Tensor | None:
        """`[3, len(positions)]`: the axes of text at `positions` after everything in the cache; None without axes.

        Text goes on from the largest axis: an image of many tokens takes only as many positions as it is high or wide.
        """
        if self.axes is None or not len(self):
            return None
        return (positions + int(self.axes.max()) - int(self.positions.max())).expand(3, -1)

    def index_of(self, positions: Sequence[int] | Tensor) -> Tensor:
        """Where in the cache `positions` stand, int64 `[len(positions)]`.

        Raises:
            UnsupportedError: a position is absent or held twice.
        """
        wanted = torch.as_tensor(positions, dtype=torch.long)
        if not len(wanted):
            return wanted
        ordered, order = torch.sort(self.positions, stable=True)
        place = torch.searchsorted(ordered, wanted)
        after = torch.searchsorted(ordered, wanted, right=True)
        if not bool((after - place == 1).all()):
            bad = wanted[after - place != 1]
            what = "has no entry" if after[after - place != 1][0] == place[after - place != 1][0] else "has two entries"
            raise UnsupportedError(f"The cache {what} at position {int(bad[0])}.")
        return order[place]

    def take(self, index: Tensor | slice) -> KVCache:
        """The entries at `index` (not position), in that order; a slice shares storage."""
        layers = tuple(layer.take(index) for layer in self.layers)
        axes = None if self.axes is None else self.axes[:, index]
        source_axes = None if self.source_axes is None else self.source_axes[:, index]
        return KVCache(layers, self.positions[index], self.source_positions[index], axes, source_axes)

    @staticmethod
    def join(caches: Sequence[KVCache]) -> KVCache:
        """The entries of all caches, one after the other, positions as they are."""
        layers = tuple(LayerKV.join(parts) for parts in zip(*(cache.layers for cache in caches), strict=True))
        return KVCache(layers, *joined_places(caches))

    def fingerprint(self) -> str:
        """sha256 of everything in the cache: equal exactly when two caches are bit-equal."""
        digest = hashlib.sha256()
        for layer in self.layers:
            for tensor in (layer.keys, layer.values, layer.source_keys):
                digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(self.positions.numpy().tobytes() + self.source_positions.numpy().tobytes())
        for axes in (self.axes, self.source_axes):
            digest.update(b"" if axes is None else axes.contiguous().numpy().tobytes())
        return digest.hexdigest()


def joined_places(caches: Sequence[KVCache]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Positions, source positions, axes and source axes of all caches, one after the other."""
    plain = all(cache.axes is None for cache in caches)
    return (
        torch.cat([cache.positions for cache in caches]),
        torch.cat([cache.source_positions for cache in caches]),
        None if plain else torch.cat([cache.triples for cache in caches], dim=1),
        None if plain else torch.cat([cache.source_triples for cache in caches], dim=1),
    )


def _take(tensor: Tensor, index: Tensor | slice) -> Tensor:
    if isinstance(index, slice):
        return tensor[:, :, index]
    return tensor.index_select(2, index.to(tensor.device))


def _put(tensor: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_copy(2, index.to(tensor.device), rows.to(tensor.device, tensor.dtype))
