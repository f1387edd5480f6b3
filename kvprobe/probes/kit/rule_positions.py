"""Positions in the rule of a gated prompt, read from its tokens: where the rule's cases stand, and which of them fires.

The conclusion of a gated prompt is the case of its rule that fires. Stated as *the first case fires*, it means the same
in every skeleton, whatever the words, and is the exclusive or of the field's value and the order of the cases: a pair's
two prompts have the same rule and opposite conclusions, so neither the rule alone nor the field alone determines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvprobe.errors import UnsupportedError
from kvprobe.tasks.context import Span
from kvprobe.tasks.pairs import Pair

Place = Literal["field", "first_case", "rule", "conversation", "task", "decision"]
Target = Literal["conclusion", "option", "other_xor", "field"]


@dataclass(frozen=True)
class Case:
    """One case of the rule, as token positions.

    Attributes:
        fires_in_base: whether it is the base's case; it is the donor's otherwise.
        value: last token of the value it names, None for a case that names none ("otherwise").
        action: its action's token.
        end: its full stop, the token right after whichever of the two comes last.
    """

    fires_in_base: bool
    value: int | None
    action: int
    end: int


def rule_cases(pair: Pair) -> tuple[Case, Case]:
    """The two cases of the rule, in the order in which they are stated.

    Raises:
        UnsupportedError: the prompt has no policy, or its policy does not name both actions.
    """
    policy = segment(pair, "policy")
    cases = [_case(pair, policy, of_base) for of_base in (True, False)]
    stops = {pair.base.token_ids[case.end] for case in cases if case.value is not None}
    # "Otherwise" may be said behind the action, so such a case ends with the next full stop.
    first, second = sorted(
        (
            case if case.value is not None else replace(case, end=_next(pair, policy, case.action, stops))
            for case in cases
        ),
        key=lambda case: case.action,
    )
    return first, second


def case_positions(pair: Pair) -> list[int]:
    """Where each case's value, its action and its end stand: six tokens, an action twice where no value is named."""
    return [
        position
        for case in rule_cases(pair)
        for position in (case.action if case.value is None else case.value, case.action, case.end)
    ]


def segment(pair: Pair, name: str) -> Span:
    """The span of a segment.

    Raises:
        UnsupportedError: the prompt has none of that name.
    """
    if name not in pair.base.spans:
        raise UnsupportedError(f"The prompt has no segment {name!r}; it has {', '.join(pair.base.spans)}.")
    return pair.base.spans[name]


def place_positions(pair: Pair, places: Sequence[Place]) -> list[int]:
    """The position of each place, a single token.

    `field`: the value's last token; `first_case` and `rule`: the end of the first and of the last case; `conversation`
    and `task`: the last token of these segments (where the assistant has promised to look, and where the options have
    been named); `decision`: the last token of the prompt.
    """
    positions = []
    for place in places:
        if place in ("first_case", "rule"):
            positions.append(rule_cases(pair)[place == "rule"].end)
        elif place == "decision":
            positions.append(pair.decision_position)
        else:
            positions.append(segment(pair, place).end - 1)
    return positions


def labels(pair: Pair, target: Target) -> tuple[bool, bool]:
    """What a probe is to predict for the base and the donor prompt; always opposite, so chance is exactly one half.

    conclusion   the rule's first case fires: field x case order
    option       the task's first option is right: field x polarity x option order, known from the task on only
    other_xor    an interaction of the same two places that no rule asks for: an arbitrary bit of the field's word
                 against an arbitrary bit of the first case's action (which of the pair's two words has the smaller
                 token id). As hard for a linear reading as the conclusion, and of no use to the model (critique ME4)
    field        that arbitrary bit of the field's word alone: its content, which means nothing in another skeleton
    """
    field = _field_ids(pair, base=True) < _field_ids(pair, base=False)
    answers = pair.base_answer_id, pair.donor_answer_id
    if target == "conclusion":
        base = rule_cases(pair)[0].fires_in_base
    elif target == "option":
        places = [_find(pair, segment(pair, "task"), (answer,)) for answer in answers]
        if None in places:
            raise UnsupportedError("The task does not name both actions, so it has no first option.")
        base = places == sorted(places)  # type: ignore[type-var]
    elif target == "other_xor":
        first, second = answers if rule_cases(pair)[0].fires_in_base else answers[::-1]
        base = field != (first < second)
    else:
        base = field
    return base, not base


def _case(pair: Pair, policy: Span, of_base: bool) -> Case:
    action = _find(pair, policy, (pair.base_answer_id if of_base else pair.donor_answer_id,))
    if action is None:
        raise UnsupportedError("The policy does not name both actions, so its cases cannot be told apart.")
    value = _find(pair, policy, _field_ids(pair, base=of_base))
    last = action if value is None else max(action, value)
    return Case(of_base, value, action, min(last + 1, policy.end - 1))


def _next(pair: Pair, span: Span, position: int, stops: set[int]) -> int:
    """The first position after `position` in `span` that holds one of `stops`, or else the next one."""
    after = range(position + 1, span.end)
    return next((place for place in after if pair.base.token_ids[place] in stops), min(position + 1, span.end - 1))


def _field_ids(pair: Pair, *, base: bool) -> tuple[int, ...]:
    ids = (pair.base if base else pair.donor).token_ids
    return tuple(ids[pair.field.start : pair.field.end])


def _find(pair: Pair, span: Span, words: tuple[int, ...]) -> int | None:
    """Position of the last token of the first occurrence of `words` in `span`."""
    ids = pair.base.token_ids
    for start in range(span.start, span.end - len(words) + 1):
        if ids[start : start + len(words)] == words:
            return start + len(words) - 1
    return None
