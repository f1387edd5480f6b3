"""A Hugging Face cache whose rows share one base and differ in a few entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from torch import Tensor

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.interventions import KVPatch, layers_of


class PatchedLayer:
    """One layer: rows are laid out only while the model attends, so a single layer's copies exist at a time.

    It answers what a Hugging Face `Cache` asks of a full attention layer.
    """

    is_sliding: ClassVar[bool] = False
    is_compileable: ClassVar[bool] = False
    is_initialized: ClassVar[bool] = True

    def __init__(self, base: LayerKV) -> None:
        self.base = base
        self.edits: list[tuple[int, Tensor, LayerKV]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values `[row, kv_head, base and new entries, head_dim]`; nothing is kept."""
        keys, values = _lay_out(self.base.keys, key_states), _lay_out(self.base.values, value_states)
        for row, index, entries in self.edits:
            keys[row].index_copy_(1, index, entries.keys[0].to(keys))
            values[row].index_copy_(1, index, entries.values[0].to(values))
        return keys, values

    def get_seq_length(self) -> int:
        """Entries before the tokens that are run."""
        return self.base.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys and offset of the first one."""
        return self.get_seq_length() + query_length, 0


def patched_cache(base: KVCache, rows: Sequence[Sequence[KVPatch]]) -> Any:
    """A cache of `len(rows)` rows, each `base` with its patches applied in order."""
    from transformers.cache_utils import Cache

    layers = [PatchedLayer(layer) for layer in base.layers]
    for number, patches in enumerate(rows):
        for patch in patches:
            here, there = base.index_of(patch.positions), patch.donor.index_of(patch.positions)
            here = here.to(base.layers[0].keys.device)
            for layer in layers_of(patch, len(layers)):
                layers[layer].edits.append((number, here, patch.donor.layers[layer].take(there)))
    return Cache(layers=cast(Any, layers))


def _lay_out(base: Tensor, new: Tensor) -> Tensor:
    rows, heads, count, width = new.shape
    length = base.shape[2]
    whole = new.new_empty((rows, heads, length + count, width))
    whole[:, :, :length] = base
    whole[:, :, length:] = new
    return whole
