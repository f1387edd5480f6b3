"""Attention of many rows over one base cache that all of them share.

Rows of a sweep differ from their base in a few entries. Here keys and values of the base are read once for all rows,
by one matrix product, and only changed entries come from the donors: memory grows with the base and the changes, not
with rows times base. It acts through the model library's attention interface, so projections, norms and RoPE are the
model's own; masks (windows, knockouts) and soft-capping are applied here as there.

The scheme is that of prefix-shared decoding (Juravsky et al. 2024, arXiv 2402.05099), with entries exchanged by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.interventions import KVPatch, differing_entries
from kvprobe.engine.patched import RowEdit, SharedBaseLayer, patched_cache
from kvprobe.engine.planner import SCORES_AT_ONCE
from kvprobe.models.subject import Subject

_NAME = "kvprobe_shared_prefix"
# Rows of one part share the entries that any of them takes from a donor, so parts stay small.
_ROWS = 64


class SharedPrefixLayer(SharedBaseLayer):
    """One layer: new entries alone pass through the model, the base stays here for the attention function.

    `new` are the keys and values of the last pass, `[row, kv_head, token, head_dim]` each.
    """

    new: tuple[Tensor, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new entries as they are."""
        self.new = key_states, value_states
        return self.new


@dataclass(frozen=True, eq=False)
class _Exchange:
    """What the rows of one part take from donors.

    Attributes:
        sources: donors with the entries `[entry]` taken from each, one after the other.
        rows: `[exchange]`, within the part.
        here: `[exchange]`, the base's entry that is exchanged.
        entries: `[exchange]`, which of the sources' entries takes its place.
    """

    sources: tuple[tuple[KVCache, Tensor], ...]
    rows: Tensor
    here: Tensor
    entries: Tensor

    def of_layer(self, number: int) -> LayerKV:
        """Keys and values of all sources, `[1, kv_head, entry, head_dim]`."""
        return LayerKV.join([donor.layers[number].take(there) for donor, there in self.sources])


_Parts = list[tuple[slice, _Exchange | None]]


class _Active:
    """The cache that the model attends to now, with its rows cut into parts, once for all layers of equal edits."""

    def __init__(self, cache: Any, base: KVCache, device: torch.device) -> None:
        self.layers: Sequence[SharedPrefixLayer] = cache.layers
        self.base = base
        self.device = device
        self._parts: dict[tuple[int, ...], _Parts] = {}

    def parts(self, layer: SharedPrefixLayer, rows: int, most: int) -> _Parts:
        """Consecutive rows, at most `most` in a part, and what they take from donors in `layer`."""
        key = tuple(map(id, layer.edits))
        if key not in self._parts:
            self._parts[key] = _parts(self.base, layer.edits, rows, most, self.device)
        return self._parts[key]


_ACTIVE: ContextVar[_Active] = ContextVar("shared prefix")


def cache_of_rows(
    subject: Subject, base: KVCache, rows: Sequence[Sequence[KVPatch]], *, laid_out: bool = False
) -> AbstractContextManager[Any]:
    """The cache of one pass over rows that differ from `base` in patches, for the length of a `with` block.

    Rows share the base, unless they are to be `laid_out` or the architecture cannot; arguments as in `shared_prefix`.
    """
    if laid_out or not subject.architecture.shares_prefix:
        return nullcontext(patched_cache(base, rows))
    return shared_prefix(subject, base, rows)


@contextmanager
def shared_prefix(subject: Subject, base: KVCache, rows: Sequence[Sequence[KVPatch]]) -> Iterator[Any]:
    """Inside the block the model attends by row to `base` with its patches.

    Args:
        subject: the model, whose attention function is another inside the block.
        base: one row of cached entries.
        rows: the patches of each row, applied in order.

    Yields:
        The cache to hand to the model, of `len(rows)` rows.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    cache = patched_cache(base, rows, SharedPrefixLayer)
    config = subject.config
    before = config._attn_implementation
    token = _ACTIVE.set(_Active(cache, base, subject.device))
    config._attn_implementation = _NAME
    try:
        yield cache
    finally:
        config._attn_implementation = before
        _ACTIVE.reset(token)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function: `query` `[row, head, token, head_dim]`, `key` and `value` of the same tokens.

    Returns `[row, token, head, head_dim]`.
    """
    active = _ACTIVE.get()
    layer = active.layers[module.layer_idx]
    rows, heads, tokens, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    result = query.new_empty(rows, tokens, heads, value.shape[-1])
    most = max(1, min(_ROWS, SCORES_AT_ONCE // (heads * tokens * (layer.get_seq_length() + tokens))))
    masks = attention_mask.expand(rows, -1, -1, -1)
    for part, exchange in active.parts(layer, rows, most):
        result[part] = _attend_part(
            layer,
            exchange,
            query=query[part],
            key=key[part],
            value=value[part],
            mask=masks[part],
            scale=scale,
            softcap=softcap,
        )
    return result, None


def _attend_part(
    layer: SharedPrefixLayer,
    exchange: _Exchange | None,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    rows, _, tokens, width = query.shape
    kv_heads, base = key.shape[1], layer.get_seq_length()
    # One kv head serves a group of heads; group and token are one axis from here on.
    asked = query.reshape(rows, kv_heads, -1, width).transpose(0, 1)
    scores = _product(asked, layer.base.keys[0].mT)
    if exchange is not None:
        theirs = exchange.of_layer(layer.number)
        place = slice(None), exchange.rows, slice(None), exchange.here
        taken = slice(None), exchange.rows, slice(None), exchange.entries
        scores[place] = _product(asked, theirs.keys[0].to(key).mT)[taken]
    scores = torch.cat([scores, asked @ key.transpose(0, 1).mT], dim=-1).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    by_token = scores.view(kv_heads, rows, -1, tokens, base + tokens)
    by_token += mask[:, 0, None]
    # As the model library does, though never in less than the model's own precision.
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    seen = weights[..., base:] @ value.transpose(0, 1)
    if exchange is not None:
        moved = weights.new_zeros(*weights.shape[:3], theirs.keys.shape[2])
        moved[taken] = weights[place]
        weights[place] = 0
        seen += _product(moved, theirs.values[0].to(value))
    seen += _product(weights[..., :base], layer.base.values[0])
    return seen.view(kv_heads, rows, -1, tokens, value.shape[-1]).permute(1, 3, 0, 2, 4).flatten(2, 3)


def _product(rows: Tensor, shared: Tensor) -> Tensor:
    """`rows` `[kv_head, row, asked, a]` times `shared` `[kv_head, a, b]`, one matrix product for each kv head."""
    kv_heads, count, asked, width = rows.shape
    return (rows.reshape(kv_heads, count * asked, width) @ shared).view(kv_heads, count, asked, -1)


def _parts(base: KVCache, edits: Sequence[RowEdit], rows: int, most: int, device: torch.device) -> _Parts:
    """Rows cut so that the entries which a part takes from donors do not outgrow the base."""
    length, donors = len(base), {id(edit.donor): edit.donor for edit in edits}
    numbers = {key: number for number, key in enumerate(donors)}
    source = torch.full((rows, length), -1)
    equal = {key: _equal_entries(base, donor, edits) for key, donor in donors.items()}
    for edit in edits:
        source[edit.row, edit.here] = numbers[id(edit.donor)]
        if edit.no_op:
            source[edit.row, edit.here[equal[id(edit.donor)][edit.here]]] = -1
    codes = [(line * length + torch.arange(length))[line >= 0] for line in source]
    parts: _Parts = []
    start = 0
    while start < rows:
        stop, together = start + 1, set(codes[start].tolist())
        while stop < min(rows, start + most) and len(wider := together | set(codes[stop].tolist())) <= length:
            stop, together = stop + 1, wider
        exchange = _exchange(base, list(donors.values()), codes[start:stop], device) if together else None
        parts.append((slice(start, stop), exchange))
        start = stop
    return parts


def _equal_entries(base: KVCache, donor: KVCache, edits: Sequence[RowEdit]) -> Tensor:
    """Bool `[entry]`: what `donor` changes nothing of, among the edits that are declared no-ops.

    It stays the base's: what is declared to change nothing changes not even the rounding.
    """
    equal = torch.zeros(len(base), dtype=torch.bool)
    declared = [edit.here for edit in edits if edit.no_op and edit.donor is donor]
    if declared:
        here = torch.cat(declared).unique()
        equal[here] = ~differing_entries(base, donor, base.positions[here])
    return equal


def _exchange(base: KVCache, donors: Sequence[KVCache], codes: Sequence[Tensor], device: torch.device) -> _Exchange:
    """Of rows that take the entries `codes`, each a donor's number times the base's length plus the base's entry."""
    length = len(base)
    needed = torch.cat(list(codes)).unique()
    sources = []
    for number in (needed // length).unique().tolist():
        here = needed[needed // length == number] % length
        sources.append((donors[number], donors[number].index_of(base.positions[here])))
    rows = torch.repeat_interleave(torch.arange(len(codes)), torch.tensor([len(code) for code in codes]))
    taken = torch.cat(list(codes))
    entries = torch.searchsorted(needed, taken)
    return _Exchange(tuple(sources), rows.to(device), (taken % length).to(device), entries.to(device))
