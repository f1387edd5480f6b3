"""A Hugging Face cache whose rows share one base and differ in a few entries, every row laid out whole.

It is the reference path of sweeps: `kvprobe.engine.shared_prefix` gives the same without laying rows out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.interventions import KVPatch, layers_of


@dataclass(frozen=True, eq=False)
class RowEdit:
    """Entries `here` `[entry]` of one row are entries `there` `[entry]` of the donor; `no_op` as the patch says."""

    row: int
    here: Tensor
    donor: KVCache
    there: Tensor
    no_op: bool


class SharedBaseLayer:
    """One layer of a cache whose rows share `base`, as a Hugging Face `Cache` asks of a full attention layer.

    Args:
        number: of the layer.
        base: keys and values of one row.
        edits: what differs by row, later ones over earlier ones.
    """

    is_sliding: ClassVar[bool] = False
    is_compileable: ClassVar[bool] = False
    is_initialized: ClassVar[bool] = True

    def __init__(self, number: int, base: LayerKV, edits: Sequence[RowEdit]) -> None:
        self.number = number
        self.base = base
        self.edits = edits

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the model attends to, for the new entries `[row, kv_head, token, head_dim]`; nothing is kept."""
        raise NotImplementedError

    def get_seq_length(self) -> int:
        """Entries before the tokens that are run."""
        return self.base.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys and offset of the first one."""
        return self.get_seq_length() + query_length, 0


class PatchedLayer(SharedBaseLayer):
    """Rows are laid out only while the model attends, so that a single layer's copies exist at a time."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values `[row, kv_head, base and new entries, head_dim]`."""
        keys, values = _lay_out(self.base.keys, key_states), _lay_out(self.base.values, value_states)
        for edit in self.edits:
            entries = edit.donor.layers[self.number].take(edit.there)
            here = edit.here.to(keys.device)
            keys[edit.row].index_copy_(1, here, entries.keys[0].to(keys))
            values[edit.row].index_copy_(1, here, entries.values[0].to(values))
        return keys, values


def patched_cache(base: KVCache, rows: Sequence[Sequence[KVPatch]], layer: type[SharedBaseLayer] = PatchedLayer) -> Any:
    """A Hugging Face cache of `len(rows)` rows, each `base` with its patches applied in order."""
    from transformers.cache_utils import Cache

    edits: list[list[RowEdit]] = [[] for _ in base.layers]
    for number, patches in enumerate(rows):
        for patch in patches:
            here, there = base.index_of(patch.positions), patch.donor.index_of(patch.positions)
            edit = RowEdit(number, here, patch.donor, there, patch.no_op)
            for chosen in layers_of(patch, len(edits)):
                edits[chosen].append(edit)
    made = [layer(number, entries, edits[number]) for number, entries in enumerate(base.layers)]
    return Cache(layers=cast(Any, made))


def _lay_out(base: Tensor, new: Tensor) -> Tensor:
    rows, heads, count, width = new.shape
    length = base.shape[2]
    whole = new.new_empty((rows, heads, length + count, width))
    whole[:, :, :length] = base
    whole[:, :, length:] = new
    return whole
