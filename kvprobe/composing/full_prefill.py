"""No reuse: every chunk is run where it stands. What all schemes are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvprobe.composing.base import REUSE_SCHEMES, Placed, ReuseScheme
from kvprobe.composing.chunk import Chunk
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@REUSE_SCHEMES.register("full_prefill")
class FullPrefill(ReuseScheme):
    """Run the chunk's tokens behind what is there: as right as a prefill, and as dear."""

    name: ClassVar[str] = "full_prefill"
    reuses: ClassVar[bool] = False

    def place(self, subject: Subject, before: KVCache | None, chunk: Chunk) -> Placed:
        """The chunk's tokens run."""
        start = 0 if before is None else len(before)
        result = forward(subject, chunk.token_ids, before)
        return Placed(result.cache, result.receipt, tuple(range(start, len(result.cache))))
