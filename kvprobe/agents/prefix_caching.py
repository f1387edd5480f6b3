"""Prefix caching: what any serving engine does by itself (critique UA1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvprobe.agents.base import AGENTS, Agent, Turned, run_behind_prefix
from kvprobe.agents.conversation import Ids
from kvprobe.engine.cache import KVCache


@AGENTS.register("prefix_caching")
class PrefixCaching(Agent):
    """Keep the longest prefix of tokens that the last prompt and this one share, and run the rest."""

    name: ClassVar[str] = "prefix_caching"
    hoisted: ClassVar[bool] = False
    """Whether the state is stated at the end of the prompt."""
    _held: tuple[Ids, KVCache | None] = ((), None)

    def turn(self, changes: Sequence[str]) -> Turned:  # noqa: ARG002
        """The prompt of the current state, run from where it leaves the last one."""
        ids = self.conversation.prompt(self.state, self.answers, hoisted=self.hoisted)
        result = run_behind_prefix(self.subject, *self._held, ids)
        self._held = ids, result.cache
        return Turned(ids, result.logits, result.receipt)
