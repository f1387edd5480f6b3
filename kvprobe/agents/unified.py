"""The unified agent: compose the policy once, edit what changes in place, keep the prefix, run what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from kvprobe.agents import base
from kvprobe.agents.base import AGENTS, Agent, Turned, common_prefix
from kvprobe.agents.composing import compose_first
from kvprobe.agents.conversation import REQUEST, Ids
from kvprobe.composing.chunk import Chunk
from kvprobe.edit.auto import Auto
from kvprobe.edit.base import CachedPrompt, EditMethod, make_method
from kvprobe.edit.retraction import apply_without_old_news
from kvprobe.edit.splicing import with_segment_replaced
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import Forward, forward
from kvprobe.engine.receipt import Receipt
from kvprobe.tasks.context import Span


@AGENTS.register("unified")
class Unified(Agent):
    """Compose the first prompt from the compiled policy, then edit the running cache and append to it.

    The cache always holds the conversation up to the last request; questions are asked and dropped. A change edits what
    is held, by `edit`; an erratum goes where the conversation then stands, and an earlier one of the same variable is
    taken out.

    Args:
        subject: the model.
        conversation: its words.
        parameters: the agent's own.
        policy: the compiled policy.
        method: the edit method, in place of that named by `edit`; AUTO must be fitted first and so is handed over here.
    """

    name: ClassVar[str] = "unified"
    uses_chunk: ClassVar[bool] = True

    class Parameters(base.Parameters):
        """How it composes and edits."""

        edit: str = Field("full_downstream", description="the edit method, by name")
        scheme: str = Field("splice", description="how the compiled policy is put into the first prompt")

    def __init__(
        self,
        subject: Any,
        conversation: Any,
        parameters: Any = None,
        policy: Chunk | None = None,
        *,
        method: EditMethod | None = None,
    ) -> None:
        super().__init__(subject, conversation, parameters, policy)
        self.method = make_method(self.parameters.edit) if method is None else method
        self.chosen: tuple[str, ...] = ()
        """What the edits of the last turn were made by."""
        self._ids: Ids = ()
        self._spans: dict[str, Span] = {}
        self._cache: KVCache | None = None

    def turn(self, changes: Sequence[str]) -> Turned:
        """The first turn composed; later ones edited where something changed, and gone on."""
        self.chosen = ()
        if self._cache is None:
            return self._first()
        pending = self.conversation.answered(self.answers[-1])
        receipt = Receipt()
        if changes and self.method.name == "full_downstream":
            # Several changes in one go: all from the first of them on is run once, with what is new.
            self._rewritten(changes)
        elif changes:
            receipt = self._appended(pending).receipt
            pending = ()
            for name in changes:
                receipt = receipt + self._edited(name)
        return self._asked(pending, receipt)

    def forget(self) -> None:
        """Compose anew in the next turn."""
        self._cache = None

    def _first(self) -> Turned:
        conversation = self.conversation
        started = compose_first(self, self.parameters.scheme)
        beginning, self._spans = conversation.beginning(self.state)
        self._ids = (*beginning, *conversation.history(self.answers), *conversation.request)
        self._cache = started.cache.take(slice(0, len(self._ids)))
        result = forward(self.subject, conversation.question[-1:], started.cache)
        return Turned((*self._ids, *conversation.question), result.logits, started.receipt + result.receipt)

    def _appended(self, ids: Ids) -> Forward:
        """Put tokens behind what is held, and run all that has no entries yet."""
        held = 0 if self._cache is None else len(self._cache)
        self._ids = (*self._ids, *ids)
        result = forward(self.subject, self._ids[held:], self._cache)
        self._cache = result.cache
        return result

    def _rewritten(self, changes: Sequence[str]) -> None:
        """Put the new values in their places and drop the entries from the first of them on."""
        assert self._cache is not None
        for name in changes:
            value, before = self.conversation.variables[name].values[self.state[name]], self._ids
            self._ids, self._spans = with_segment_replaced(before, self._spans, name, value)
            self._cache = self._cache.take(slice(0, min(common_prefix(before, self._ids), len(self._cache))))
        self.chosen = (self.method.name,) * len(changes)

    def _edited(self, name: str) -> Receipt:
        """Edit what is held; the next request's first token stands for what an erratum is put in front of."""
        assert self._cache is not None
        end = len(self._ids)
        spans = {**self._spans, REQUEST: Span(end, end + 1)}
        stale = CachedPrompt((*self._ids, self.conversation.request[0]), spans, self._cache)
        edit = self.conversation.variables[name].edit(name, self.state[name], REQUEST)
        self.chosen += (self.method.chosen(stale, edit) if isinstance(self.method, Auto) else self.method.name,)
        edited = apply_without_old_news(self.subject, self.method, stale, edit)
        spans = dict(edited.prompt.spans)
        del spans[REQUEST]
        self._ids, self._spans, self._cache = edited.prompt.token_ids[:-1], spans, edited.prompt.cache
        return edited.receipt

    def _asked(self, pending: Ids, receipt: Receipt) -> Turned:
        """What is pending and the request, which stay, and the question, which does not."""
        question = self.conversation.question
        result = self._appended((*pending, *self.conversation.request, *question))
        ids = self._ids
        self._ids = ids[: len(ids) - len(question)]
        self._cache = result.cache.take(slice(0, len(self._ids)))
        return Turned(ids, result.logits, receipt + result.receipt)
