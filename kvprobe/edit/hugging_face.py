"""Caches of Hugging Face in and out of an editable context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvprobe.edit.base import CachedPrompt
from kvprobe.engine.cache import KVCache
from kvprobe.engine.first_layers import entries_at_layer
from kvprobe.errors import UnsupportedError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

# Kernels differ by a few hundredths in bfloat16; another token's key is another vector altogether.
_SAME_KEY = 0.1


def imported(subject: Subject, token_ids: Sequence[int], past: Any) -> KVCache:
    """A copy of a Hugging Face cache of the tokens, the last one's entry left out.

    The keys of the first layer, which know their own token and position alone, are compared with the model's own.

    Raises:
        UnsupportedError: it is of another length, another model or other tokens, or not a full dynamic cache.
    """
    cache = KVCache.from_hugging_face(subject.architecture.own_cache(past))
    before = len(token_ids) - 1
    if cache.batch != 1 or len(cache) not in (before, before + 1):
        raise UnsupportedError(
            f"The Hugging Face cache holds {cache.batch} rows of {len(cache)} tokens and the prompt has {before + 1}: "
            "prefill EditableContext.tokenized(...) of the same parts, one row, and generate nothing before."
        )
    own, _ = entries_at_layer(subject, token_ids[:-1], None, 0)
    cache = cache.take(slice(0, before))
    held = cache.layers[0].keys
    if len(cache.layers) != subject.layers or held.shape != own.keys.shape or held.dtype != own.keys.dtype:
        raise UnsupportedError(
            f"The Hugging Face cache has {len(cache.layers)} layers of {held.dtype} keys {list(held.shape)} and "
            f"{subject.name} makes {subject.layers} of {own.keys.dtype} {list(own.keys.shape)}; it is another model's."
        )
    away = _lengths(held.double() - own.keys.double()) / _lengths(own.keys.double())
    if float(away.max()) > _SAME_KEY:
        first = int((away > _SAME_KEY).nonzero()[0])
        raise UnsupportedError(
            f"The Hugging Face cache was not made from the context's tokens: the key at position {first} is "
            "another token's or stands elsewhere; prefill EditableContext.tokenized(...) of the same parts."
        )
    return _copied(cache)


def _lengths(keys: torch.Tensor) -> torch.Tensor:
    """`[position]`: norm over heads and channels of keys `[1, kv_head, position, head_dim]`."""
    return keys.square().sum((0, 1, 3)).sqrt()


def model_inputs(subject: Subject, prompt: CachedPrompt) -> dict[str, Any]:
    """Keyword arguments of Hugging Face's `generate` that go on from a cached prompt, on a copy of its cache."""
    ids = torch.tensor([prompt.token_ids], device=subject.device)
    cache = prompt.cache
    last = torch.tensor([int(cache.positions[-1]) + 1 if len(cache) else 0])
    following = cache.text_axes(last)
    axes = None if following is None else torch.cat([cache.triples, following], dim=1)
    places = subject.architecture.generation_positions(torch.cat([cache.positions, last]), axes)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        # Told, for a model may keep positions of an unrelated call.
        "position_ids": places.to(subject.device),
        "past_key_values": subject.architecture.model_cache(_copied(cache).to_hugging_face()),
    }


def _copied(cache: KVCache) -> KVCache:
    layers = ((layer.keys.clone(), layer.values.clone()) for layer in cache.layers)
    return KVCache.computed(layers, cache.positions)
