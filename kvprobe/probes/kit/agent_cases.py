"""Pairs of task agent_turns as conversations: the inclusion gate, references, and edits for AUTO to learn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvprobe.agents.conversation import FIELD, REQUEST, RULE, Conversation, Ids, conversation_of
from kvprobe.edit.auto import CANDIDATES, Case, candidate
from kvprobe.edit.base import CachedPrompt, Edited, make_method
from kvprobe.edit.signals import free_signals
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.probes.base import Measurement
from kvprobe.probes.gating import gate_columns
from kvprobe.tasks.context import Span
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

CELLS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Every `(rule, state)`."""


@dataclass(frozen=True, eq=False)
class AgentCase:
    """A pair as a conversation.

    Attributes:
        conversation: its words.
        common: columns that every row carries for the inclusion gate.
    """

    subject: Subject
    pair: Pair
    conversation: Conversation
    common: Measurement
    _prefilled: dict[Ids, Readout] = field(default_factory=dict)

    def prefilled(self, ids: Ids) -> Readout:
        """The decision behind a full prefill of a prompt; each prompt is run once."""
        if ids not in self._prefilled:
            self._prefilled[ids] = read(prefill(self.subject, ids).logits, *self.conversation.answers)
        return self._prefilled[ids]


def agent_case(subject: Subject, pair: Pair) -> AgentCase:
    """The conversation of a pair, and what the gate reads of it.

    The gate sees the worse of two prompts on either side: a model counts only if it decides rightly in all four
    combinations of rule and state. Two of them come behind a history in which every answer has been given once, so a
    model that repeats its last answer fails.

    Raises:
        ConfigError: the pair is not one of task agent_turns.
    """
    conversation = conversation_of(pair, subject.tokenizer)
    readings = {}
    for rule, value in CELLS:
        state = {RULE: rule, FIELD: value}
        right = conversation.right(state)
        ids = conversation.prompt(state, (right, 1 - right) if rule else ())
        readings[rule, value] = (ids, read(prefill(subject, ids).logits, *conversation.answers))
    ids, first = readings[0, 0]
    again = read(forward(subject, ids[-1:], forward(subject, ids[:-1]).cache).logits, *conversation.answers)
    base = max((readings[cell][1] for cell in ((0, 0), (1, 1))), key=lambda reading: reading.margin)
    donor = min((readings[cell][1] for cell in ((0, 1), (1, 0))), key=lambda reading: reading.margin)
    common = gate_columns(base, donor, abs(again.margin - first.margin))
    return AgentCase(subject, pair, conversation, common, dict(readings.values()))


def is_decided(case: AgentCase) -> bool:
    """Whether the model decides the first turn rightly in all four combinations."""
    return bool(case.common["m_base"] < 0 < case.common["m_donor"])


def auto_cases(case: AgentCase) -> list[Case]:
    """Two edits of the conversation after its first turn, of the state and of the rule, by every candidate of AUTO."""
    subject, conversation = case.subject, case.conversation
    start = {RULE: 0, FIELD: 0}
    ids, spans = conversation.beginning(start)
    history = (*ids, *conversation.request, *conversation.answered(0))
    end = len(history)
    stale = CachedPrompt.prefilled(subject, (*history, conversation.request[0]), {**spans, REQUEST: Span(end, end + 1)})
    cases = []
    for name in (RULE, FIELD):
        edit = conversation.variables[name].edit(name, 1, REQUEST)
        full = _answer(case, make_method("full_reprefill").apply(subject, stale, edit))
        agrees = {
            candidate_name: _answer(case, candidate(candidate_name).apply(subject, stale, edit)) == full
            for candidate_name in CANDIDATES
        }
        cases.append(Case(free_signals(stale, edit), agrees))
    return cases


def _answer(case: AgentCase, edited: Edited) -> bool:
    conversation = case.conversation
    asked = (*conversation.request, *conversation.question)
    logits = forward(case.subject, asked, edited.prompt.cache).logits
    return read(logits, *conversation.answers).margin > 0
