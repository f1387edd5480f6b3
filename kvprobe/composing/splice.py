"""Reposition and splice, with a seam repaired or not: the paper's own way (section 5.1), and EPIC's."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvprobe.composing import base
from kvprobe.composing.base import REUSE_SCHEMES, Placed, ReuseScheme, next_position
from kvprobe.composing.chunk import Chunk
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward
from kvprobe.engine.operations import concat, reposition
from kvprobe.engine.receipt import Receipt

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def moved_behind(subject: Subject, before: KVCache | None, entries: KVCache, position: int) -> Placed:
    """`entries` rotated so that the first stands at `position`, behind `before`; nothing is computed."""
    moved, turning = reposition(subject, entries, position - int(entries.positions[0]))
    if before is None or not len(before):
        return Placed(moved, turning)
    whole, joining = concat(before, moved)
    return Placed(whole, turning + Receipt(tokens_reused=len(before), seconds=joining.seconds))


def seam_repaired(subject: Subject, before: KVCache | None, chunk: Chunk, tokens: int) -> Placed:
    """`chunk` behind `before`, its first `tokens` tokens run where they stand, the others moved."""
    start = 0 if before is None else len(before)
    position = next_position(before)
    repaired = min(tokens, len(chunk))
    if not repaired:
        return moved_behind(subject, before, chunk.cache, position)
    seam = forward(subject, chunk.token_ids[:repaired], before)
    computed = tuple(range(start, start + repaired))
    if repaired == len(chunk):
        return Placed(seam.cache, seam.receipt, computed)
    rest = chunk.cache.take(slice(repaired, None))
    placed = moved_behind(subject, seam.cache, rest, position + repaired)
    return Placed(placed.cache, seam.receipt + placed.receipt, computed)


@REUSE_SCHEMES.register("splice")
class Splice(ReuseScheme):
    """Rotate the chunk's keys to where it stands and put it there; the first `seam` tokens are run anew."""

    name: ClassVar[str] = "splice"

    class Parameters(base.Parameters):
        """How much of the seam is repaired."""

        seam: int = Field(0, ge=0, description="first tokens of every chunk that are run where they stand")

    def place(self, subject: Subject, before: KVCache | None, chunk: Chunk) -> Placed:
        """The chunk moved behind what is there."""
        return seam_repaired(subject, before, chunk, self.parameters.seam)


@REUSE_SCHEMES.register("epic")
class Epic(ReuseScheme):
    """EPIC's LegoLink: the first tokens of every chunk but one at the very start are recomputed (Hu et al., 2024)."""

    name: ClassVar[str] = "epic"

    class Parameters(base.Parameters):
        """How many tokens."""

        tokens: int = Field(8, ge=1, description="first tokens of each chunk that are run where they stand")

    def place(self, subject: Subject, before: KVCache | None, chunk: Chunk) -> Placed:
        """A chunk at the start of the prompt is right as it is."""
        return seam_repaired(subject, before, chunk, self.parameters.tokens if next_position(before) else 0)
