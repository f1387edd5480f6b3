"""Every turn from scratch: what the paper compares with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvprobe.agents.base import AGENTS, Agent, Turned
from kvprobe.engine.forward import prefill


@AGENTS.register("reprefill")
class Reprefill(Agent):
    """Keep no cache: prefill the whole prompt of every turn."""

    name: ClassVar[str] = "reprefill"

    def turn(self, changes: Sequence[str]) -> Turned:  # noqa: ARG002
        """The prompt of the current state, run from its first token."""
        ids = self.conversation.prompt(self.state, self.answers)
        result = prefill(self.subject, ids)
        return Turned(ids, result.logits, result.receipt)
