"""The weights an organism starts from: heads that already look back, match and copy, composed into induction heads.

Found by gradient descent alone, the comparison of a rule's case with the field takes most of a small model's training,
and looking a value up in a rule that came before it was never found at all. The heads below have both in them from the
first step, without knowing any word or task (the "mimetic initialization" of Trockman and Kolter, 2023; the induction
heads of Olsson et al., 2022). RoPE turns fast channels by the distance of two tokens and leaves slow ones nearly as
they are, so content is compared in the slow channels and places in the fast ones, as Barbero et al. (2024) find in
trained models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Channel pairs, of 16 in a head of 32 channels: slower than these, RoPE hardly turns within a prompt.
_FAST_PAIRS = 7
# The fastest pairs tell neighbouring distances apart.
_PLACE_PAIRS = 4
# Layer: how far back its two look-back heads look, in tokens (from an action to its value, and so on).
_LOOK_BACK = {0: (2, 3), 1: (5, 1)}
_PLACE_SHARPNESS = 1.3
# How much of a token's content a head copies that does not look back.
_COPY_SHARE = 0.3
# Random weights that the heads below leave in place, against the usual hidden ** -0.5.
_REST_SHARE = 0.3
# Scale of a matcher's queries and keys; queries and keys that are normed have it in the norm instead.
_SHARPNESS, _NORMED_SHARPNESS = 1.4, 2.0


@torch.no_grad()
def initialize(model: Any) -> None:
    """Set the first weights of embeddings and attention; MLPs keep the architecture's own.

    - Words fill the first half of the residual stream. Its first channel is the same for all words, so that a head can
      tell places alone; the second half is left to the look-back heads, a frame of `head_dim` channels for each layer.
    - In the first two layers the second KV head *looks back* a few tokens and puts the word it finds into the frame.
    - The first query head of every other KV head is a *matcher*, in slow channels: it looks for its own word. But in
      the first KV head, the first and last layer excepted, it looks for a token in whose frame its own word stands,
      and so finds what followed this word before.
    - Every head that does not look back *copies* the words it finds, or, in the second KV head of every other layer,
      the words in their frames: what stood before this word.
    """
    config = model.config
    words, width = config.hidden_size // 2, config.head_dim
    # The usual 0.02 drowns the words in what the layers add; Gemma multiplies embeddings by sqrt(hidden).
    spread = 0.14 if config.model_type.startswith("gemma") else 0.42
    embeddings = model.model.embed_tokens.weight
    embeddings.zero_()
    torch.nn.init.normal_(embeddings[:, 1:words], std=spread)
    embeddings[:, 0] = constant = 0.7 * spread / 0.3
    # What RMSNorm divides by.
    size = ((spread**2 * (words - 1) + constant**2) / config.hidden_size) ** 0.5
    # Of each word, the part that the look-back heads of one layer keep.
    mixed = _orthogonal(words - 1)
    kept = [_in_channels(rows, config.hidden_size, 1) for rows in (mixed[:width], mixed[-width:])]
    frames = [_in_channels(torch.eye(width), config.hidden_size, words + layer * width) for layer in _LOOK_BACK]
    last = len(model.model.layers) - 1
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        queries, keys = _start(attention, config)
        sharpness = 1.0 if hasattr(attention, "q_norm") else _SHARPNESS
        for head in range(config.num_key_value_heads):
            seen = _in_channels(_orthogonal(words - 1)[:width], config.hidden_size, 1)
            if head == 1 and number in _LOOK_BACK:
                _values(attention, config, head, kept[number], size * frames[number].T)
                _looking_back(queries[head], keys[head], _LOOK_BACK[number], size / constant, _theta(config))
                continue
            if head == 0 and 0 < number < last:
                layer_of_frame = (number + 1) % 2
                _matching(queries[head], keys[head], kept[layer_of_frame], frames[layer_of_frame], sharpness)
            else:
                _matching(queries[head], keys[head], seen, seen, sharpness)
            if head == 1 and number % 2 == 0:
                _values(attention, config, head, frames[number // 2 % 2], _COPY_SHARE * kept[number // 2 % 2].T)
            else:
                _values(attention, config, head, seen, _COPY_SHARE * seen.T)


def _theta(config: Any) -> float:
    return float(config.rope_parameters.get("rope_theta") or config.rope_parameters["full_attention"]["rope_theta"])


def _orthogonal(size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size))[0]


def _in_channels(rows: Tensor, hidden: int, first: int) -> Tensor:
    """`rows` `[row, channel]` as `[row, hidden]`, with zeros but for the channels from `first` on."""
    placed = torch.zeros(len(rows), hidden)
    placed[:, first : first + rows.shape[1]] = rows
    return placed


def _start(attention: Any, config: Any) -> tuple[Tensor, Tensor]:
    """Small random queries `[kv_head, query head, channel, hidden]` and keys `[kv_head, channel, hidden]`."""
    keys = attention.k_proj.weight.view(config.num_key_value_heads, config.head_dim, -1)
    queries = attention.q_proj.weight.view(config.num_key_value_heads, -1, config.head_dim, config.hidden_size)
    for projection in (queries, keys):
        torch.nn.init.normal_(projection, std=_REST_SHARE * config.hidden_size**-0.5)
        projection[..., 0] = 0
    if hasattr(attention, "q_norm"):
        attention.q_norm.weight.fill_(_NORMED_SHARPNESS)
    return queries, keys


def _values(attention: Any, config: Any, head: int, read: Tensor, write: Tensor) -> None:
    """One KV head's values read by `read` `[head_dim, hidden]`; its query heads write by `write`, the other way."""
    width, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    attention.v_proj.weight[head * width : (head + 1) * width] = read
    for query in range(head * group, (head + 1) * group):
        attention.o_proj.weight[:, query * width : (query + 1) * width] = write


def _matching(queries: Tensor, keys: Tensor, own: Tensor, found: Tensor, sharpness: float) -> None:
    """`queries` `[query head, channel, hidden]` and `keys` `[channel, hidden]`: `own` finds an equal `found`."""
    width = len(keys)
    half = width // 2
    slow = [channel for channel in range(width) if channel % half >= _FAST_PAIRS]
    mixed = torch.zeros(width, width)
    mixed[slow] = torch.randn(len(slow), width) * width**-0.5
    queries[0] = sharpness * mixed @ own
    keys[:] = sharpness * mixed @ found


def _looking_back(queries: Tensor, keys: Tensor, distances: tuple[int, ...], scale: float, theta: float) -> None:
    """The same shapes: each query head looks a fixed number of tokens back, by the constant channel."""
    width = len(keys)
    half = width // 2
    queries.zero_()
    keys.zero_()
    pair = torch.arange(_PLACE_PAIRS)
    turn = theta ** (-2 * pair / width)
    phase = torch.rand(_PLACE_PAIRS) * 2 * torch.pi
    size = _PLACE_SHARPNESS * (width / _PLACE_PAIRS) ** 0.5 * scale
    keys[pair, 0], keys[pair + half, 0] = size * phase.cos(), size * phase.sin()
    for head, distance in enumerate(distances):
        turned = phase - turn * distance
        queries[head, pair, 0], queries[head, pair + half, 0] = size * turned.cos(), size * turned.sin()
