"""The weights an organism starts from: heads that already match, look back and copy.

Found by gradient descent alone, the comparison of a rule's case with the field takes most of a small model's
training. The heads below have it in them from the first step, without knowing any word or task (the "mimetic
initialization" of Trockman and Kolter, 2023). RoPE turns fast channels by the distance of two tokens and leaves slow
ones nearly as they are, so content is compared in the slow channels and places in the fast ones, as Barbero et al.
(2024) find in trained models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Channel pairs, of 16 in a head of 32 channels: slower than these, RoPE hardly turns within a prompt.
_FAST_PAIRS = 7
# The fastest pairs tell neighbouring distances apart.
_PLACE_PAIRS = 4
_LOOK_BACK_LAYERS = 3
# How far back the two look-back heads of a layer look, in tokens: the value before an action, and so on.
_FIRST_DISTANCES, _LATER_DISTANCES = (1, 3), (2, 5)
_FAST_SHARE, _CONTENT_SHARE, _COPY_SHARE = 0.1, 0.3, 0.3


@torch.no_grad()
def initialize(model: Any) -> None:
    """Set the first weights of embeddings and attention; MLPs keep the architecture's own.

    - Embeddings are wide, and their first channel is the same for all words, so that a head can tell places alone.
    - In every layer the first query head of a KV head is a *matcher*: its queries equal its keys, in slow channels.
    - In the first layers the second KV head *looks back*: its queries are its keys turned by a few tokens.
    - Every head *copies*: its output matrix is the transpose of its value matrix.
    """
    config = model.config
    # The usual 0.02 drowns the words in what the layers add; Gemma multiplies embeddings by sqrt(hidden).
    spread = 0.1 if config.model_type.startswith("gemma") else 0.3
    embeddings = model.model.embed_tokens.weight
    torch.nn.init.normal_(embeddings, std=spread)
    embeddings[:, 0] = constant = spread / 0.3
    # What RMSNorm makes of the constant channel.
    normed = constant / (spread**2 + constant**2 / config.hidden_size) ** 0.5
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        _copying(attention, config)
        keys = attention.k_proj.weight.view(config.num_key_value_heads, config.head_dim, -1)
        queries = attention.q_proj.weight.view(config.num_key_value_heads, -1, config.head_dim, config.hidden_size)
        for projection in (queries, keys):
            torch.nn.init.normal_(projection, std=config.hidden_size**-0.5)
            projection[..., 0] = 0
        for head in range(config.num_key_value_heads):
            if head == 1 and number < _LOOK_BACK_LAYERS:
                distances = _FIRST_DISTANCES if number == 0 else _LATER_DISTANCES
                _looking_back(queries[head], keys[head], distances, normed)
            else:
                _matching(queries[head], keys[head])


def _copying(attention: Any, config: Any) -> None:
    """Values project the residual stream orthogonally and outputs put it back, a share of it."""
    width, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    values = attention.v_proj.weight
    torch.nn.init.orthogonal_(values)
    for head in range(config.num_attention_heads):
        kept = values[(head // group) * width : (head // group + 1) * width]
        attention.o_proj.weight[:, head * width : (head + 1) * width] = _COPY_SHARE * kept.T


def _matching(queries: Tensor, keys: Tensor) -> None:
    """`queries` `[query head, channel, hidden]` and `keys` `[channel, hidden]` of one KV head: a matcher."""
    half = len(keys) // 2
    fast = [*range(_FAST_PAIRS), *range(half, half + _FAST_PAIRS)]
    keys *= (half / (half - _FAST_PAIRS)) ** 0.5
    keys[fast] *= _FAST_SHARE
    queries[0] = keys


def _looking_back(queries: Tensor, keys: Tensor, distances: tuple[int, ...], normed: float) -> None:
    """The same shapes: each query head looks a fixed number of tokens back, by the constant channel."""
    width = len(keys)
    half = width // 2
    keys *= _CONTENT_SHARE
    queries *= _CONTENT_SHARE
    pair = torch.arange(_PLACE_PAIRS)
    turn = 10000.0 ** (-2 * pair / width)
    phase = torch.rand(_PLACE_PAIRS) * 2 * torch.pi
    size = (width / _PLACE_PAIRS) ** 0.5 / normed
    keys[pair, 0], keys[pair + half, 0] = size * phase.cos(), size * phase.sin()
    for head, distance in enumerate(distances):
        turned = phase - turn * distance
        queries[head, pair, 0], queries[head, pair + half, 0] = size * turned.cos(), size * turned.sin()
