"""Prompt Cache: chunks at positions that a schema reserves for them, reused without repair (Gim et al., 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvprobe.composing import base
from kvprobe.composing.base import REUSE_SCHEMES, Placed, ReuseScheme, next_position
from kvprobe.composing.chunk import Chunk
from kvprobe.composing.splice import moved_behind
from kvprobe.engine.cache import KVCache

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@REUSE_SCHEMES.register("prompt_cache")
class PromptCache(ReuseScheme):
    """A chunk begins at the next multiple of `slot`, the place it was compiled for; positions have gaps, seams stay.

    The original compiles each module at its place in the schema. Compiled elsewhere and rotated there, keys are the
    same but for rounding.
    """

    name: ClassVar[str] = "prompt_cache"

    class Parameters(base.Parameters):
        """The schema."""

        slot: int = Field(32, ge=1, description="chunks begin at multiples of this position")

    def place(self, subject: Subject, before: KVCache | None, chunk: Chunk) -> Placed:
        """The chunk at its reserved place."""
        slot = self.parameters.slot
        return moved_behind(subject, before, chunk.cache, -(-next_position(before) // slot) * slot)
