"""The missing sink: what a chunk's first token becomes where nothing stood before it (critique CO1).

A model that is given a text parks attention on its first token, whose keys and values come out unlike all others. A
chunk compiled alone has such a token of its own, and splicing it puts a second one into the middle of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.components import components
from kvprobe.errors import ConfigError
from kvprobe.tasks.context import Span

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True)
class SinkReading:
    """A chunk's first token beside the chunk's others, layer by layer.

    Attributes:
        key_norm: norm of its keys over the median norm of the chunk's tokens.
        value_norm: the same of its values.
        attention: mean weight that all later queries put on it, over heads.
        attention_elsewhere: the same of the chunk's other tokens, for each of them.
        attention_on_start: the same of the prompt's very first token: how much of a sink the model wants at all.
    """

    key_norm: tuple[float, ...]
    value_norm: tuple[float, ...]
    attention: tuple[float, ...]
    attention_elsewhere: tuple[float, ...]
    attention_on_start: tuple[float, ...]


def read_sink(subject: Subject, token_ids: Sequence[int], cache: KVCache, chunk: Span) -> SinkReading:
    """Look at a chunk's first token in a cache, composed or prefilled.

    Args:
        subject: the model.
        token_ids: of the whole prompt.
        cache: its entries, one for each token, with or without the last one's; what stands behind the chunk is run
            again from them.
        chunk: where it stands, counted in tokens.

    Raises:
        ConfigError: the chunk has one token only, or nothing stands behind it.
        UnsupportedError: TransformerLens does not bridge the model.
    """
    if len(chunk) < 2 or chunk.end >= len(token_ids):
        raise ConfigError(
            "A sink is seen beside a chunk's other tokens and by later ones: give it two, and one behind."
        )
    here = cache.take(slice(chunk.start, chunk.end))
    weights = later_attention(subject, token_ids[chunk.end :], cache.take(slice(0, chunk.end)))
    first = [float(layer[..., chunk.start].mean()) for layer in weights]
    others = [float(layer[..., chunk.start + 1 : chunk.end].mean()) for layer in weights]
    return SinkReading(
        tuple(_first_over_median(layer.keys) for layer in here.layers),
        tuple(_first_over_median(layer.values) for layer in here.layers),
        tuple(first),
        tuple(others),
        tuple(float(layer[..., 0].mean()) for layer in weights),
    )


def later_attention(subject: Subject, token_ids: Sequence[int], cache: KVCache) -> list[Tensor]:
    """Attention weights of tokens run behind a cache, for each layer `[query, head, key]`."""
    hooks = [f"blocks.{layer}.attn.hook_pattern" for layer in range(subject.layers)]
    activations = components(subject).capture(token_ids, hooks, cache=cache).activations
    return [activations[hook] for hook in hooks]


def _first_over_median(entries: Tensor) -> float:
    norms = entries[0].double().norm(dim=(0, 2))
    return float(norms[0] / norms.median())
