"""Attention of many rows over one base cache that all of them share.

Rows of a sweep differ from their base in a few entries. Here keys and values of the base are read once for all rows,
by one matrix product, and only changed entries come from the donors: memory grows with the base and the changes, not
with rows times base. It acts through the model library's attention interface, so projections, norms and RoPE are the
model's own; masks (windows, knockouts) and soft-capping are applied here as there.

The scheme is that of prefix-shared decoding (Juravsky et al. 2024, arXiv 2402.05099), with entries exchanged by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.interventions import KVPatch, changed_entries
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
    """What some rows take from one donor.

    Attributes:
        donor: the cache it comes from.
        rows: `[row]` of a part, those that take anything.
        here: `[entry]` in the base, all that any of them takes.
        there: `[entry]` in the donor, the same ones.
        chosen: `(row, entry)` indices into `rows` and `here` of what is exchanged, `[exchange]` each.
    """

    donor: KVCache
    rows: Tensor
    here: Tensor
    there: Tensor
    chosen: tuple[Tensor, Tensor]


class _Active:
    """The cache that the model attends to now, and the exchanges of its parts, worked out once for all layers."""

    def __init__(self, cache: Any, base: KVCache, device: torch.device) -> None:
        self.layers: Sequence[SharedPrefixLayer] = cache.layers
        self.base = base
        self.device = device
        self._exchanges: dict[tuple[int, int, tuple[int, ...]], list[_Exchange]] = {}

    def exchanges(self, layer: SharedPrefixLayer, start: int, stop: int) -> list[_Exchange]:
        """Of rows `start` to `stop` in `layer`."""
        edits = [edit for edit in layer.edits if start <= edit.row < stop]
        key = start, stop, tuple(map(id, edits))
        if key not in self._exchanges:
            self._exchanges[key] = _exchanges(self.base, edits, range(start, stop), self.device)
        return self._exchanges[key]


_ACTIVE: ContextVar[_Active] = ContextVar("shared prefix")


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
    step = max(1, min(_ROWS, SCORES_AT_ONCE // (heads * tokens * (layer.get_seq_length() + tokens))))
    masks = attention_mask.expand(rows, -1, -1, -1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        exchanges = active.exchanges(layer, start, min(rows, start + step))
        result[part] = _attend_part(
            layer,
            exchanges,
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
    exchanges: Sequence[_Exchange],
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
    donated = []
    for exchange in exchanges:
        entries = exchange.donor.layers[layer.number].take(exchange.there)
        keys, values = entries.keys[0].to(key), entries.values[0].to(value)
        donated.append(values)
        row, entry = exchange.chosen
        theirs = _product(asked[:, exchange.rows], keys.mT)
        scores[:, exchange.rows[row], :, exchange.here[entry]] = theirs[:, row, :, entry]
    scores = torch.cat([scores, asked @ key.transpose(0, 1).mT], dim=-1).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    by_token = scores.view(kv_heads, rows, -1, tokens, base + tokens)
    by_token += mask[:, 0, None]
    # As the model library does, though never in less than the model's own precision.
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    seen = weights[..., base:] @ value.transpose(0, 1)
    for exchange, values in zip(exchanges, donated, strict=True):
        row, entry = exchange.chosen
        place = slice(None), exchange.rows[row], slice(None), exchange.here[entry]
        taken = weights.new_zeros(kv_heads, len(exchange.rows), weights.shape[2], len(exchange.here))
        taken[:, row, :, entry] = weights[place]
        weights[place] = 0
        seen[:, exchange.rows] += _product(taken, values)
    seen += _product(weights[..., :base], layer.base.values[0])
    return seen.view(kv_heads, rows, -1, tokens, value.shape[-1]).permute(1, 3, 0, 2, 4).flatten(2, 3)


def _product(rows: Tensor, shared: Tensor) -> Tensor:
    """`rows` `[kv_head, row, asked, a]` times `shared` `[kv_head, a, b]`, one matrix product for each kv head."""
    kv_heads, count, asked, width = rows.shape
    return (rows.reshape(kv_heads, count * asked, width) @ shared).view(kv_heads, count, asked, -1)


def _exchanges(base: KVCache, edits: Sequence[RowEdit], rows: range, device: torch.device) -> list[_Exchange]:
    if not edits:
        return []
    last = torch.full((len(rows), len(base)), -1)
    for number, edit in enumerate(edits):
        last[edit.row - rows.start, edit.here] = number
    donors: dict[int, list[int]] = {}
    for number, edit in enumerate(edits):
        donors.setdefault(id(edit.donor), []).append(number)
    made = []
    for numbers in donors.values():
        donor = edits[numbers[0]].donor
        taken = torch.isin(last, torch.tensor(numbers))
        # Equal entries stay the base's, so that a transplant of a cache onto itself changes not even the rounding.
        taken[:, taken.any(0)] &= changed_entries(base, donor, base.positions[taken.any(0)]).any(0)
        if not bool(taken.any()):
            continue
        taking, here = taken.any(1).nonzero()[:, 0], taken.any(0).nonzero()[:, 0]
        there = donor.index_of(base.positions[here])
        row, entry = taken[taking][:, here].nonzero(as_tuple=True)
        chosen = row.to(device), entry.to(device)
        made.append(_Exchange(donor, taking.to(device), here.to(device), there, chosen))
    return made
