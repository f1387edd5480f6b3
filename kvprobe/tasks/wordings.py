"""Wordings: how a scenario's abstract content is put into English."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvprobe.registry import KINDS, Registry

WORDINGS: Registry[type[Wording]] = Registry(KINDS["WORDINGS"])
TRAINED = ("dialogue", "manual", "memo")
"""The wordings that the organisms were taught, in the order in which their tokenizer numbers their words; it has no
words of any other."""


class Wording(ABC):
    """Texts of one style. A rule is a list of `(value or None, action)`; `None` stands for every other value."""

    answer_cue: ClassVar[str] = "Answer:"
    thought_cue: ClassVar[str] = "Thought:"

    @abstractmethod
    def system(self, domain: str) -> str:
        """The opening line."""

    @abstractmethod
    def record(self, entity: str, field: str) -> tuple[str, str]:
        """Text before and after the value in a session line."""

    def line(self, entity: str, field: str, value: str) -> str:
        """A whole session line."""
        before, after = self.record(entity, field)
        return f"{before} {value}{after}"

    session_header: ClassVar[str] = ""
    policy_header: ClassVar[str] = ""

    def policy(
        self, entity: str, field: str, cases: Sequence[tuple[str | None, str]], marks: Sequence[str] = ()
    ) -> str:
        """The rule; `marks` are remarks put behind the cases, as manuals have them ("(holds)")."""
        remarks = [f" ({mark})" for mark in marks] or [""] * len(cases)
        clauses = [self.case(entity, field, value, action) for value, action in cases]
        return self.policy_header + "".join(
            f"{clause}{remark}\n" for clause, remark in zip(clauses, remarks, strict=True)
        )

    @abstractmethod
    def case(self, entity: str, field: str, value: str | None, action: str) -> str:
        """One case of the rule, ending in its full stop."""

    @abstractmethod
    def both(self, first: tuple[str, str, str], second: tuple[str, str, str], action: str) -> str:
        """One case that holds when two `(entity, field, value)` do, ending in its full stop."""

    def status(self, action: str) -> str:
        """A remark after the policy that states the action."""
        return f"As things stand this means {action}.\n"

    def filler(self, notes: Sequence[str]) -> str:
        """Neutral notes."""
        return "".join(f"- {note}\n" for note in notes)

    def conversation(self, request: str, field: str) -> str:
        """The person's request and the assistant's promise to look."""
        return f"User: {request}.\nAssistant: I will check the {field}.\n"

    def update(self, entity: str, field: str, value: str) -> str:
        """The one-line erratum."""
        return f"Update: the {entity} {field} is now {value}; this replaces the earlier one.\n"

    def task(self, field: str, options: Sequence[str]) -> str:
        """The question, with the options in the given order."""
        return f"Task: decide by the {field}. Reply with {options[0]} or {options[1]}.\n"

    def chain(self, entity: str, field: str, value: str, action: str) -> str:
        """A chain of thought that goes back to the session line, ends with the cue, and lacks the answer."""
        return f" {self.line(entity, field, value)}So the policy says {action}.\n{self.answer_cue}"


@WORDINGS.register("manual")
class Manual(Wording):
    """A staff manual: If the order status is pending, then cancel."""

    session_header = "Session\n"
    policy_header = "Policy\n"

    def system(self, domain: str) -> str:
        """The opening line."""
        return f"You work at the {domain} desk.\n"

    def record(self, entity: str, field: str) -> tuple[str, str]:
        """Text before and after the value in a session line."""
        return f"{entity} {field}:", "\n"

    def case(self, entity: str, field: str, value: str | None, action: str) -> str:
        """One case of the rule, ending in its full stop."""
        return f"If the {entity} {field} is {value}, then {action}." if value else f"Otherwise {action}."

    def both(self, first: tuple[str, str, str], second: tuple[str, str, str], action: str) -> str:
        """One case that holds when two `(entity, field, value)` do, ending in its full stop."""
        conditions = " and ".join(f"the {entity} {field} is {value}" for entity, field, value in (first, second))
        return f"If {conditions}, then {action}."


@WORDINGS.register("memo")
class Memo(Wording):
    """A terse memo: status = pending means cancel."""

    session_header = "Record\n"
    policy_header = "Rules\n"

    def system(self, domain: str) -> str:
        """The opening line."""
        return f"Desk: {domain}\n"

    def record(self, entity: str, field: str) -> tuple[str, str]:
        """Text before and after the value in a session line."""
        return f"{entity} {field} =", ";\n"

    def case(self, entity: str, field: str, value: str | None, action: str) -> str:
        """One case of the rule, ending in its full stop."""
        return f"{field} = {value} means {action}." if value else f"all else means {action}."

    def both(self, first: tuple[str, str, str], second: tuple[str, str, str], action: str) -> str:
        """One case that holds when two `(entity, field, value)` do, ending in its full stop."""
        conditions = " and ".join(f"{field} = {value}" for _, field, value in (first, second))
        return f"{conditions} means {action}."


@WORDINGS.register("dialogue")
class Dialogue(Wording):
    """A talk between people, the action named before its case: cancel when the status is pending."""

    def system(self, domain: str) -> str:
        """The opening line."""
        return f"A talk at the {domain} desk.\n"

    def record(self, entity: str, field: str) -> tuple[str, str]:
        """Text before and after the value in a session line."""
        return f"Clerk: The {field} of the {entity} is", ".\n"

    def case(self, entity: str, field: str, value: str | None, action: str) -> str:
        """One case of the rule, ending in its full stop."""
        condition = f"when the {field} is {value}" if value else "in all other cases"
        return f"Manager: We {action} {condition}."

    def both(self, first: tuple[str, str, str], second: tuple[str, str, str], action: str) -> str:
        """One case that holds when two `(entity, field, value)` do, ending in its full stop."""
        conditions = " and ".join(f"the {field} is {value}" for _, field, value in (first, second))
        return f"Manager: We {action} when {conditions}."


@WORDINGS.register("checklist")
class Checklist(Wording):
    """Facts and rules as lists, and a question: pretrained models follow it best. No organism was taught it."""

    session_header = "Facts:\n"
    policy_header = "Rules:\n"

    def system(self, domain: str) -> str:
        """The opening line."""
        return f"You work at the {domain} desk and follow the rules.\n"

    def record(self, entity: str, field: str) -> tuple[str, str]:
        """Text before and after the value in a session line."""
        return f"- The {field} of the {entity} is", ".\n"

    def case(self, entity: str, field: str, value: str | None, action: str) -> str:
        """One case of the rule, ending in its full stop."""
        return f"- When the {field} of the {entity} is {value}: {action}." if value else f"- Otherwise: {action}."

    def both(self, first: tuple[str, str, str], second: tuple[str, str, str], action: str) -> str:
        """One case that holds when two `(entity, field, value)` do, ending in its full stop."""
        conditions = " and ".join(f"the {field} of the {entity} is {value}" for entity, field, value in (first, second))
        return f"- When {conditions}: {action}."

    def conversation(self, request: str, field: str) -> str:
        """The person's request."""
        return f"Request: {request}.\n"

    def task(self, field: str, options: Sequence[str]) -> str:
        """The question, with the options in the given order."""
        return f"Apply the rules to the facts. Which action is right, {options[0]} or {options[1]}?\n"
