"""What an agent is told: the words of a conversation as tokens, its state, and the prompt of every turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe.edit.base import FieldEdit
from kvprobe.errors import AlignmentError, ConfigError
from kvprobe.tasks.context import Span, TokenizedContext, encode_segment
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import WORDINGS

Ids = tuple[int, ...]
State = Mapping[str, int]
"""Which of its two values each variable holds."""
RULE, FIELD = "rule", "field"
CHUNK = ("policy", RULE, "filler")
"""Segments of the policy, which follow one another and hold no state."""
REQUEST = "conversation"


@dataclass(frozen=True)
class Variable:
    """What may change in a conversation.

    Attributes:
        values: the tokens of its two values, as they stand in the segment of its name.
        errata: the tokens that say each value anew: the state's erratum, or the policy's header and cases.
    """

    values: tuple[Ids, Ids]
    errata: tuple[Ids, Ids]

    def edit(self, name: str, value: int, insert_before: str) -> FieldEdit:
        """The change to a value, for every edit method."""
        return FieldEdit(name, self.values[value], self.errata[value], None, insert_before)


@dataclass(frozen=True)
class Conversation:
    """The words of one conversation.

    Attributes:
        head: what comes before the first request, as named tokens; `rule` and `field` hold their first values.
        variables: `rule` and `field`.
        line: what stands before and after the state's value in its line.
        request: tokens of a request, which stays in the history.
        question: tokens from the task to the cue, which are asked anew in each turn and not kept.
        answer_line: what stands before and after an answer in the history.
        answers: tokens of the two answers: of the base and of the donor.
        changes: for each turn the variables that go to their other value before it.
    """

    head: tuple[tuple[str, Ids], ...]
    variables: Mapping[str, Variable]
    line: tuple[Ids, Ids]
    request: Ids
    question: Ids
    answer_line: tuple[Ids, Ids]
    answers: tuple[int, int]
    changes: tuple[tuple[str, ...], ...]

    def right(self, state: State) -> int:
        """Which answer is right: changing the state or the rule turns it, changing both does not."""
        return state[RULE] ^ state[FIELD]

    def answered(self, answer: int) -> Ids:
        """The line of the history that holds an answer."""
        before, after = self.answer_line
        return (*before, self.answers[answer], *after)

    def beginning(self, state: State, *, with_state: bool = True) -> tuple[Ids, dict[str, Span]]:
        """The head in a state, and where its segments stand; `with_state=False` leaves the state's line out."""
        ids: list[int] = []
        spans: dict[str, Span] = {}
        for name, given in self.head:
            tokens = self.variables[name].values[state[name]] if name in self.variables else given
            if not with_state:
                tokens = self._without_line(name, tokens)
            if tokens:
                spans[name] = Span(len(ids), len(ids) + len(tokens))
                ids += tokens
        return tuple(ids), spans

    def history(self, answers: Sequence[int]) -> Ids:
        """All earlier turns: each its request and the answer that was given."""
        return tuple(token for answer in answers for token in (*self.request, *self.answered(answer)))

    def prompt(self, state: State, answers: Sequence[int], *, hoisted: bool = False) -> Ids:
        """The whole prompt of a turn; `hoisted` states the state right before the question."""
        beginning, _ = self.beginning(state, with_state=not hoisted)
        before, after = self.line
        line = (*before, *self.variables[FIELD].values[state[FIELD]], *after) if hoisted else ()
        return (*beginning, *self.history(answers), *self.request, *line, *self.question)

    def _without_line(self, name: str, tokens: Ids) -> Ids:
        before, after = self.line
        if name == FIELD:
            return ()
        if name == "session":
            return tokens[: len(tokens) - len(before)]
        return tokens[len(after) :] if name == "session_rest" else tokens


def conversation_of(pair: Pair, tokenizer: Any) -> Conversation:
    """The conversation of a pair of task `agent_turns`, in that model's tokens.

    Raises:
        ConfigError: the pair is of another task.
        AlignmentError: the line of the state cannot be taken out of its block.
    """
    attributes, base, style = pair.scenario.attributes, pair.base, WORDINGS.get(pair.scenario.wording)()
    if "changes" not in attributes or not {"rule_changed", "both_changed"} <= set(pair.variants):
        raise ConfigError("An agent needs pairs of task agent_turns.")
    pieces = _pieces(base)
    names = [name for name, _ in pieces]
    ask, task = names.index(REQUEST), names.index("task")
    header = _ids(base, base.spans["policy"]) if "policy" in base.spans else ()
    about = attributes["entity"], attributes["field"]
    rules = _ids(base, base.spans[RULE]), _ids(pair.variants["rule_changed"], base.spans[RULE])
    fields = _ids(base, base.spans[FIELD]), _ids(pair.donor, base.spans[FIELD])
    old, new = (encoded(style.update(*about, attributes[key]), tokenizer) for key in ("old", "new"))
    variables = {
        RULE: Variable(rules, ((*header, *rules[0]), (*header, *rules[1]))),
        FIELD: Variable(fields, (old, new)),
    }
    before, after = (encoded(text, tokenizer) for text in style.record(*about))
    around = dict(pieces)
    if around["session"][-len(before) :] != before or around["session_rest"][: len(after)] != after:
        raise AlignmentError("The tokenizer joins the line of the state with what stands beside it.")
    return Conversation(
        tuple(pieces[:ask]),
        variables,
        (before, after),
        _ids(base, base.spans[REQUEST]),
        tuple(token for _, ids in pieces[task:] for token in ids),
        (encoded(style.answer_cue, tokenizer), encoded("\n", tokenizer)),
        (pair.base_answer_id, pair.donor_answer_id),
        tuple(_changed(word) for word in attributes["changes"].split()),
    )


def encoded(text: str, tokenizer: Any) -> Ids:
    """Tokens of a text as in the middle of a text."""
    return tuple(encode_segment(text, tokenizer))


def _changed(word: str) -> tuple[str, ...]:
    return {"none": (), "both": (RULE, FIELD)}.get(word, (word,))


def _pieces(prompt: TokenizedContext) -> list[tuple[str, Ids]]:
    """The prompt's tokens by segment; those before the first are called `bos`."""
    spans = sorted(prompt.spans.items(), key=lambda item: item[1])
    first = spans[0][1].start
    start = [("bos", prompt.token_ids[:first])] if first else []
    return [*start, *((name, _ids(prompt, span)) for name, span in spans)]


def _ids(prompt: TokenizedContext, span: Span) -> Ids:
    return prompt.token_ids[span.start : span.end]
