"""Pairs of task two_fields as editable contexts: their questions, the right answer in every state, and a full prefill.

A question is asked by its own task block on the same context. Under rules of their own there are two questions, one by
each field; under an AND rule there is one, by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any

from kvprobe.edit.context import EditableContext
from kvprobe.edit.readings import Decision
from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.probes.base import Measurement
from kvprobe.probes.gating import gate_columns
from kvprobe.tasks.library import Skeleton, skeletons
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import WORDINGS

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FIELDS = ("field", "second_field")
BOTH = "both_fields"
State = tuple[str, str]
"""The values of the two fields."""


@dataclass(frozen=True)
class Question:
    """What is asked of a context.

    Attributes:
        name: the field it is decided by, or `both_fields`.
        answers: the two actions in the order in which the task offers them.
        right: the right one of them by state.
        refusal: the one that refuses, as a rule: the library's second action.
        task: the text of its task block; `None` for the one that the prompt has.
    """

    name: str
    answers: tuple[str, str]
    right: Mapping[State, str]
    refusal: str
    task: str | None = None


@dataclass(frozen=True, eq=False)
class TwoFieldCase:
    """A pair of two_fields, prefilled.

    Attributes:
        context: the base prompt; copy it before editing.
        values: by field, its old and its new value.
        questions: what is asked of it.
        common: columns that every row carries for the inclusion gate, from full prefills of the pair's two prompts.
    """

    subject: Subject
    pair: Pair
    context: EditableContext
    values: Mapping[str, State]
    questions: tuple[Question, ...]
    common: Measurement
    _prefilled: dict[tuple[State, str], Decision] = dataclass_field(default_factory=dict)

    def ask(self, context: EditableContext, question: Question) -> Decision:
        """The decision on a context, its task block exchanged where the question needs it."""
        asked = context if question.task is None else context.with_segment("task", question.task)
        return asked.decide(question.answers)

    def prefilled(self, state: State, question: Question) -> Decision:
        """The decision after a full prefill of the prompt with these values; each is made once."""
        key = state, question.name
        if key not in self._prefilled:
            context = self.context.copy()
            for name, value in zip(FIELDS, state, strict=True):
                context.set(name, value, "full_reprefill")
            self._prefilled[key] = self.ask(context, question)
        return self._prefilled[key]

    def row(self, context: EditableContext, question: Question) -> Measurement:
        """One decision on an edited context, beside the right answer, the full prefill's and what constants would say.

        `margin` is how far the right answer leads, in logits; `changed` says whether the base's answer was another.
        """
        state = state_of(context)
        decision, full = self.ask(context, question), self.prefilled(state, question)
        ought = question.right[state]
        start = question.right[self.values["field"][0], self.values["second_field"][0]]
        margin, full_margin = (_lead(each, ought) for each in (decision, full))
        answers = list(question.right.values())
        balance = 2 * answers.count(ought) - len(answers)
        return {
            "question": question.name,
            "joint": self.pair.scenario.attributes["joint"],
            "changed": ought != start,
            "margin": margin,
            "correct": margin > 0,
            "agrees": (margin > 0) == (full_margin > 0),
            "prefill_correct": full_margin > 0,
            "margin_error": abs(margin - full_margin),
            "mass": sum(decision.probabilities.values()),
            "baseline_first_option": float(question.answers[0] == ought),
            "baseline_refuse": float(question.refusal == ought),
            "baseline_majority": 0.5 if not balance else float(balance > 0),
        }


def two_field_case(subject: Subject, pair: Pair) -> TwoFieldCase:
    """Prefill a pair's base and work out its questions.

    Raises:
        ConfigError: the pair is not one of task two_fields.
    """
    attributes = pair.scenario.attributes
    if "second_field" not in attributes:
        raise ConfigError("These pairs have one field; use task two_fields.")
    context = EditableContext.from_pair(subject, pair)
    values = {
        "field": (attributes["old"], attributes["new"]),
        "second_field": (attributes["second_old"], attributes["second_new"]),
    }
    questions = _questions(pair, subject.tokenizer)
    return TwoFieldCase(subject, pair, context, values, questions, _gate_columns(subject, pair, context))


def state_of(context: EditableContext) -> State:
    """The current values of the two fields."""
    return context.state[FIELDS[0]], context.state[FIELDS[1]]


def _lead(decision: Decision, answer: str) -> float:
    own = decision.log_probabilities[answer]
    return own - max(value for other, value in decision.log_probabilities.items() if other != answer)


def _gate_columns(subject: Subject, pair: Pair, context: EditableContext) -> Measurement:
    answers = pair.base_answer_id, pair.donor_answer_id
    base, donor = (read(prefill(subject, prompt.token_ids).logits, *answers) for prompt in (pair.base, pair.donor))
    cached = read(context.prompt.decide(subject).logits, *answers)
    return gate_columns(base, donor, abs(cached.margin - base.margin))


def _questions(pair: Pair, tokenizer: Any) -> tuple[Question, ...]:
    attributes = pair.scenario.attributes
    old, new, second_old, second_new = (attributes[key] for key in ("old", "new", "second_old", "second_new"))
    by_value = {
        old: tokenizer.decode([pair.base_answer_id]).strip(),
        new: tokenizer.decode([pair.donor_answer_id]).strip(),
    }
    task, states = pair.base.spans["task"], [(a, b) for a in (old, new) for b in (second_old, second_new)]
    said = pair.base.token_ids[task.start : task.end]
    first, last = sorted(by_value, key=lambda value: said.index(_answer_id(pair, value)))
    offered = by_value[first], by_value[last]
    by_name = {skeleton.name: skeleton for skeleton in skeletons("all")}
    refusal = _refusal(by_name[pair.scenario.skeleton], offered)
    if attributes["joint"] == "and":
        named = _named_value(pair)
        other = new if named == old else old
        right = {state: by_value[named if state == (named, second_old) else other] for state in states}
        return (Question(BOTH, offered, right, refusal),)
    actions = attributes["second_old_action"], attributes["second_new_action"]
    second = next(s for s in skeletons("all") if s.field == attributes["second_field"] and {*actions} == {*s.actions})
    style = WORDINGS.get(pair.scenario.wording)()
    own = {state: actions[state[1] == second_new] for state in states}
    return (
        Question(FIELDS[0], offered, {state: by_value[state[0]] for state in states}, refusal),
        Question(FIELDS[1], actions, own, second.actions[1], style.task(attributes["second_field"], actions)),
    )


def _answer_id(pair: Pair, value: str) -> int:
    return pair.base_answer_id if value == pair.scenario.attributes["old"] else pair.donor_answer_id


def _refusal(skeleton: Skeleton, answers: Sequence[str]) -> str:
    return skeleton.actions[1] if skeleton.actions[1] in answers else answers[1]


def _named_value(pair: Pair) -> str:
    """The value of the first field that an AND rule asks for: its wording is written down for either and looked up."""
    attributes, style = pair.scenario.attributes, WORDINGS.get(pair.scenario.wording)()
    second = attributes["second_entity"], attributes["second_field"], attributes["second_old"]
    skeleton = next(s for s in skeletons("all") if s.name == pair.scenario.skeleton)
    for value in (attributes["old"], attributes["new"]):
        for action in skeleton.actions:
            if style.both((attributes["entity"], attributes["field"], value), second, action) in pair.base.text:
                return value
    raise ConfigError("The prompt does not hold its own AND rule; use task two_fields as it is.")
