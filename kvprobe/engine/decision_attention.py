"""Where the decision token looks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.components import components
from kvprobe.engine.sweep import before_decision
from kvprobe.models.subject import Subject


def decision_attention(subject: Subject, token_ids: Sequence[int], cache: KVCache) -> Tensor:
    """Attention weights of the last token, run on a filled cache.

    Args:
        subject: the model, whatever kernel it runs.
        token_ids: the whole prompt.
        cache: its cache, with or without the last token's entry (which is never used).

    Returns:
        `[layer, head, key]`, the last key being the token itself; each head's weights add up to 1.
    """
    hooks = [f"blocks.{layer}.attn.hook_pattern" for layer in range(subject.layers)]
    past, _ = before_decision(token_ids, cache)
    activations = components(subject).capture(token_ids[-1:], hooks, cache=past).activations
    return torch.stack([activations[hook][0] for hook in hooks])
