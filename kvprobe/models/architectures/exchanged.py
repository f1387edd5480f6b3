"""A Hugging Face cache seen by a model that writes its latent first and its rotary key second."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


class Exchanged(Cache):
    """The layers of another cache, shared, with the two tensors of each update exchanged both ways."""

    def __init__(self, past: Any) -> None:
        super().__init__(layers=past.layers)
        self.past = past
        # As the other cache does, one that starts empty grows its layers at the first update.
        self.layer_class_to_replicate = past.layer_class_to_replicate

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What the model calls keys is filed as values, and the other way round."""
        keys, values = super().update(value_states, key_states, layer_idx, *args, **kwargs)
        return values, keys


def exchanged(past: Any) -> Any:
    """`past` for a model that names its two tensors the other way round; what it writes is in `past` afterwards."""
    return past if past is None else Exchanged(past)


def restored(past: Any) -> Any:
    """The cache behind a view, or a cache that such a model made itself with its two tensors exchanged, uncopied."""
    if isinstance(past, Exchanged):
        return past.past
    other = copy(past)
    other.layers = [_exchange(layer) for layer in past.layers]
    return other


def _exchange(layer: Any) -> Any:
    other = copy(layer)
    other.keys, other.values = layer.values, layer.keys
    return other
