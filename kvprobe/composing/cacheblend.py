"""CacheBlend: the share of a chunk's tokens that deviates most in the first attending layer is recomputed.

After Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion" (2024).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from kvprobe.composing import base
from kvprobe.composing.base import REUSE_SCHEMES, Placed, ReuseScheme, next_position
from kvprobe.composing.chunk import Chunk
from kvprobe.composing.splice import moved_behind
from kvprobe.engine.cache import KVCache
from kvprobe.engine.first_layers import DEVIATION_LAYER, deviation, entries_at_layer
from kvprobe.engine.operations import recompute

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@REUSE_SCHEMES.register("cacheblend")
class CacheBlend(ReuseScheme):
    """Move the chunk, then run again the share of its tokens that changes most where it now stands."""

    name: ClassVar[str] = "cacheblend"

    class Parameters(base.Parameters):
        """How large a share."""

        share: float = Field(0.15, gt=0, le=1, description="share of the chunk's tokens to recompute, rounded up")

    def place(self, subject: Subject, before: KVCache | None, chunk: Chunk) -> Placed:
        """The chunk moved, its most deviating tokens recomputed through all layers."""
        moved = moved_behind(subject, before, chunk.cache, next_position(before))
        start = len(moved.cache) - len(chunk)
        fresh, choosing = entries_at_layer(subject, chunk.token_ids, before, DEVIATION_LAYER)
        change = deviation(fresh, moved.cache.layers[DEVIATION_LAYER].take(slice(start, None)))
        count = math.ceil(self.parameters.share * len(chunk))
        chosen = torch.topk(change, count).indices.sort().values + start
        # Only the chunk's own tokens are recomputed, so the ids of what stands before it are never looked up.
        ids = (*(0,) * start, *chunk.token_ids)
        cache, running = recompute(subject, moved.cache, ids, moved.cache.positions[chosen].tolist())
        return Placed(cache, moved.receipt + choosing + running, tuple(chosen.tolist()))
