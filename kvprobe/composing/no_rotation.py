"""Reuse with keys left where they were computed: the control of what rotating is good for (critique CO3)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from kvprobe.composing.base import REUSE_SCHEMES, Placed, ReuseScheme, next_position
from kvprobe.composing.chunk import Chunk
from kvprobe.engine.cache import KVCache
from kvprobe.engine.operations import concat
from kvprobe.engine.receipt import Receipt

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@REUSE_SCHEMES.register("no_rotation")
class NoRotation(ReuseScheme):
    """The chunk's keys as they were computed, at positions that are no longer theirs: a negative control."""

    name: ClassVar[str] = "no_rotation"

    def place(self, subject: Subject, before: KVCache | None, chunk: Chunk) -> Placed:
        """The chunk's entries called what they are not."""
        del subject
        shift = next_position(before) - int(chunk.cache.positions[0])
        places = chunk.cache.positions + shift
        mislabelled = replace(chunk.cache, positions=places, source_positions=places)
        if before is None or not len(before):
            return Placed(mislabelled, Receipt(tokens_reused=len(chunk)))
        whole, receipt = concat(before, mislabelled)
        return Placed(whole, receipt)
