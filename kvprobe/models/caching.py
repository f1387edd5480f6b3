"""Hugging Face caches as kvprobe hands them to a model, and whether the model fills them."""

from __future__ import annotations

from typing import Any

import torch

from kvprobe.errors import UnsupportedError
from kvprobe.models.sources.base import loading_error


def check_fills_cache(model: Any) -> None:
    """Verify that a forward pass fills a cache handed to it.

    From transformers 5.24 on, a model bridged by TransformerLens 3.9 drops the cache without a word.

    Raises:
        UnsupportedError: some layer does not hold all tokens afterwards.
    """
    past = empty_cache()
    ids = torch.ones((1, 3), dtype=torch.long, device=next(model.parameters()).device)
    first_pass(model, ids, past_key_values=past, use_cache=True)
    held = [0 if layer.keys is None else layer.keys.shape[-2] for layer in past.layers]
    if not held or any(length != 3 for length in held):
        import transformers

        raise UnsupportedError(
            f"A forward pass of {type(model).__name__} over 3 tokens leaves {min(held, default=0)} in its KV cache "
            f"under transformers {transformers.__version__}; install transformers below 5.24, which fills it."
        )


def first_pass(model: Any, ids: torch.Tensor, **arguments: Any) -> Any:
    """What a model that was just loaded makes of `ids` `[1, token]`.

    Raises:
        ModelSourceError: it fails, as it does where a configuration fits the weights' shapes and nothing else.
        OutOfMemoryError: it does not fit in memory.
    """
    try:
        with torch.no_grad():
            return model(ids, **arguments)
    except (ValueError, RuntimeError, IndexError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
        raise loading_error(error, f"{type(model).__name__} of this configuration") from error


def empty_cache() -> Any:
    """A Hugging Face cache without entries, whose layers keep all that they are given."""
    from transformers.cache_utils import DynamicCache

    # Never with a config: sliding layers would keep only window - 1 tokens.
    return DynamicCache()
