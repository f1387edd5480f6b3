"""Trajectories of one layout run side by side: what each method does to its caches, and its oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvprobe.agents.conversation import FIELD, RULE, Conversation, Ids
from kvprobe.probes.system.long_trajectory.running import Running

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

ERRATA_KEPT = "errata_kept"


@dataclass(frozen=True)
class Plan:
    """What a method does when the state changes.

    Attributes:
        field: `keep`: the value in place; `rerun`: the value and all that follows; None: nothing.
        erratum: `kept`: a further erratum; `current`: one that replaces the earlier; None: none.
        periodic: whether everything is prefilled again from time to time.
    """

    field: str | None = None
    erratum: str | None = None
    periodic: bool = False


METHODS: Mapping[str, Plan] = {
    "full_downstream": Plan(field="rerun"),
    "field_only": Plan(field="keep"),
    ERRATA_KEPT: Plan(erratum="kept"),
    "erratum": Plan(erratum="current"),
    "field_and_erratum": Plan(field="keep", erratum="current"),
    "periodic_reprefill": Plan(field="keep", periodic=True),
}


@dataclass(eq=False)
class Trajectories:
    """Conversations of one layout as tensors `[row, token]`.

    Attributes:
        beginnings: the head under either value of the state.
        place: where the state's value begins.
        values, errata: of the state.
        question: task and cue.
        lines: the line that holds either answer.
    """

    conversations: Sequence[Conversation]
    beginnings: tuple[Tensor, Tensor] = field(init=False)
    place: int = field(init=False)
    values: tuple[Tensor, Tensor] = field(init=False)
    errata: tuple[Tensor, Tensor] = field(init=False)
    question: Tensor = field(init=False)
    lines: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        given = self.conversations
        self.beginnings = _both(lambda c, v: c.beginning({RULE: 0, FIELD: v})[0], given)
        self.place = given[0].beginning({RULE: 0, FIELD: 0})[1][FIELD].start
        self.values = _both(lambda c, v: c.variables[FIELD].values[v], given)
        self.errata = _both(lambda c, v: c.variables[FIELD].errata[v], given)
        self.question = torch.tensor([c.question for c in given])
        self.lines = _both(lambda c, v: c.answered(v), given)

    def answered(self, answers: Sequence[int]) -> Tensor:
        """The lines that hold these answers, one for each row."""
        return torch.stack([self.lines[answer][row] for row, answer in enumerate(answers)])

    def margins(self, logits: Tensor) -> list[float]:
        """How far the second answer leads the first in each row, in logits."""
        first, second = torch.tensor([c.answers for c in self.conversations]).T.to(logits.device)
        each = torch.arange(len(first), device=logits.device)
        return [float(margin) for margin in logits[each, second].double() - logits[each, first].double()]


class Carried:
    """One method on its own caches, and its oracle: one cache for either value of the state."""

    def __init__(self, subject: Subject, trajectories: Trajectories, plan: Plan) -> None:
        self.trajectories, self.plan = trajectories, plan
        self.running = Running(subject, trajectories.beginnings[0])
        self.oracles = tuple(Running(subject, ids) for ids in trajectories.beginnings)
        self.answers: list[tuple[int, ...]] = []
        self._erratum: tuple[int, int] | None = None

    def change(self, value: int) -> None:
        """The state has changed to `value`."""
        given, running, plan = self.trajectories, self.running, self.plan
        if plan.field is not None:
            running.write(given.place, given.values[value], keep_after=plan.field == "keep")
        if plan.erratum is None:
            return
        if plan.erratum == "current" and self._erratum is not None:
            running.remove(*self._erratum)
        start = running.ids.shape[1]
        running.append(given.errata[value])
        self._erratum = start, running.ids.shape[1]

    def prefill_again(self) -> None:
        """Everything is recomputed with the next question."""
        self.running.forget_from(0)

    def ask(self) -> Tensor:
        """Logits `[row, vocab]` of the method itself."""
        return self.running.ask(self.trajectories.question)

    def ask_oracle(self, value: int) -> Tensor:
        """Logits with the current value in its place, behind the method's own answers."""
        return self.oracles[value].ask(self.trajectories.question)

    def remember(self, answers: Sequence[int]) -> None:
        """Put the answers into the history."""
        line = self.trajectories.answered(answers)
        for each in (self.running, *self.oracles):
            each.append(line)
        self.answers.append(tuple(answers))


def layout_of(conversation: Conversation) -> tuple[int, ...]:
    """Conversations with the same layout can be run side by side."""
    variable = conversation.variables[FIELD]
    beginning, spans = conversation.beginning({RULE: 0, FIELD: 0})
    parts = (*variable.values, *variable.errata, conversation.question, conversation.answered(0))
    return (len(beginning), spans[FIELD].start, *(len(part) for part in parts))


def _both(part: Callable[[Conversation, int], Ids], conversations: Sequence[Conversation]) -> tuple[Tensor, Tensor]:
    first, second = (torch.tensor([part(conversation, value) for conversation in conversations]) for value in (0, 1))
    return first, second
