"""Prompts composed by Hugging Face alone, to check probes of composing against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache


def plain_entries(model: Any, ids: Sequence[int], start: int = 0, header: Sequence[int] = ()) -> list[Any]:
    """Keys and values by layer of tokens that stand from position `start` on, prefilled behind a header.

    The header's positions may be negative: RoPE knows differences only.
    """
    whole = [*header, *ids]
    past = DynamicCache()
    places = torch.arange(start - len(header), start + len(ids))
    with torch.no_grad():
        model(torch.tensor([whole]), past_key_values=past, position_ids=places[None], use_cache=True)
    return [(layer.keys[:, :, len(header) :], layer.values[:, :, len(header) :]) for layer in past.layers]


def plain_composed(
    model: Any, before: Sequence[int], chunk: Sequence[Any], rest: Sequence[int], *, rest_at: int, before_at: int = 0
) -> Tensor:
    """Logits `[vocab]` behind `before`, a chunk's entries and `rest`; only for models without sliding windows."""
    past = DynamicCache()
    with torch.no_grad():
        places = torch.arange(before_at, before_at + len(before))
        model(torch.tensor([before]), past_key_values=past, position_ids=places[None], use_cache=True)
        for layer, (keys, values) in zip(past.layers, chunk, strict=True):
            layer.keys = torch.cat([layer.keys, keys], 2)
            layer.values = torch.cat([layer.values, values], 2)
        places = torch.arange(rest_at, rest_at + len(rest))
        output = model(torch.tensor([rest]), past_key_values=past, position_ids=places[None], use_cache=True)
    return output.logits[0, -1].double()
