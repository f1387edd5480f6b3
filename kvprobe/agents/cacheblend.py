"""CacheBlend's reuse for a conversation: what agrees is kept, and its most deviating tokens recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from kvprobe.agents import base
from kvprobe.agents.base import AGENTS, Agent, Turned, common_prefix
from kvprobe.agents.composing import compose_first
from kvprobe.agents.conversation import Ids
from kvprobe.composing.base import make_scheme
from kvprobe.composing.chunk import Chunk
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward
from kvprobe.engine.receipt import Receipt


@AGENTS.register("cacheblend")
class CacheBlendAgent(Agent):
    """Keep the common prefix and, behind the first changed piece, everything that is the same tokens, blended.

    The first turn blends the compiled policy. In later turns what stands behind the last change and agrees with the
    last prompt is one chunk: it is moved to its place and a share of its tokens, those that deviate most, is run anew.
    """

    name: ClassVar[str] = "cacheblend"
    uses_chunk: ClassVar[bool] = True
    _held: tuple[Ids, KVCache] | None = None

    class Parameters(base.Parameters):
        """How much is recomputed."""

        share: float = Field(0.15, gt=0, le=1, description="share of a reused piece's tokens that is recomputed")

    def turn(self, changes: Sequence[str]) -> Turned:  # noqa: ARG002
        """The prompt of the current state, with what can be reused of the last one."""
        ids = self.conversation.prompt(self.state, self.answers)
        if self._held is None:
            first = compose_first(self, "cacheblend", share=self.parameters.share)
            cache, receipt, rest = first.cache, first.receipt, ids[len(first.cache) :]
        else:
            cache, receipt, rest = self._blended(*self._held, ids)
        result = forward(self.subject, rest, cache)
        self._held = ids, result.cache
        return Turned(ids, result.logits, receipt + result.receipt)

    def forget(self) -> None:
        """Compose anew in the next turn."""
        self._held = None

    def _blended(self, held: Ids, cache: KVCache, ids: Ids) -> tuple[KVCache, Receipt, Ids]:
        """What is kept and what is blended, and the tokens that remain to be run."""
        conversation = self.conversation
        earlier = len(conversation.beginning(self.state)[0]) + len(conversation.history(self.answers[:-1]))
        same = earlier + len(conversation.request)
        kept = common_prefix(held, ids)
        if kept >= same:
            kept = min(kept, len(ids) - 1)
            return cache.take(slice(0, kept)), Receipt(tokens_reused=kept), ids[kept:]
        # The values of a variable are of equal length, so tokens that agree stand at the same places.
        changed = max(place for place in range(same) if held[place] != ids[place]) + 1
        anew = forward(self.subject, ids[kept:changed], cache.take(slice(0, kept)) if kept else None)
        chunk = Chunk(ids[changed:same], cache.take(slice(changed, same)))
        placed = make_scheme("cacheblend", share=self.parameters.share).place(self.subject, anew.cache, chunk)
        return placed.cache, anew.receipt + placed.receipt, ids[same:]
