"""Task `two_fields`: prompts in which two session fields gate the decision (protocol 5.5)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from kvprobe.tasks.base import TASKS
from kvprobe.tasks.context import Context, Segment
from kvprobe.tasks.gated import GatedScenario, Layout, Mode, render
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.pairs import PromptPair
from kvprobe.tasks.wordings import WORDINGS, Wording

Joint = Literal["own", "and", "none"]


@dataclass(frozen=True)
class SecondField:
    """A second field of the session.

    Args:
        actions: of its own rule, under `values[0]` and `values[1]`; idle with `joint="and"`.
        joint: `own`: a rule of its own stands beside the first field's, and the task says which field to decide by.
            `and`: one rule asks for the first values of both fields; all else gets the second action.
            `none`: no rule mentions the second field.
        rule_first: whether its own rule stands before the first field's.
        case_order: the order in which its own rule states its cases.
        option_order: the order in which a task about it offers its actions.
    """

    entity: str
    field: str
    values: tuple[str, str]
    actions: tuple[str, str]
    joint: Joint = "own"
    rule_first: bool = False
    case_order: tuple[int, int] = (0, 1)
    option_order: tuple[int, int] = (0, 1)


def render_two(
    scenario: GatedScenario,
    second: SecondField,
    values: tuple[str, str],
    wording: str,
    layout: Layout,
    *,
    mode: Mode = "direct",
    ask_second: bool = False,
) -> Context:
    """The prompt for one value of either field.

    As `render`, with segments `second_line`, `second_field` (the value alone) and `second_rest` after `session_rest`,
    and `second_policy` beside `policy`. With `ask_second` the task is to decide by the second field.
    """
    style = WORDINGS.get(wording)()
    before, after = style.record(second.entity, second.field)
    context = render(scenario, values[0], wording, layout, mode=mode)
    segments = []
    for segment in context.segments:
        segments.append(segment)
        if segment.name == "session_rest":
            segments += [
                Segment("second_line", before),
                Segment("second_field", f" {values[1]}"),
                Segment("second_rest", after),
            ]
    context = Context(tuple(segments))
    if second.joint == "and":
        return context.replace("policy", _joint_policy(style, scenario, second))
    if second.joint == "none":
        return context
    own = Segment("second_policy", style.policy(second.entity, second.field, _cases(second)))
    names = [segment.name for segment in context.segments]
    after_policy = names[names.index("policy") + 1]
    context = context.insert_before("policy" if second.rule_first else after_policy, own)
    if not ask_second:
        return context
    return context.replace("task", style.task(second.field, [second.actions[i] for i in second.option_order]))


def _cases(second: SecondField) -> list[tuple[str | None, str]]:
    return [(second.values[i], second.actions[i]) for i in second.case_order]


def _joint_policy(wording: Wording, scenario: GatedScenario, second: SecondField) -> str:
    first = scenario.entity, scenario.field, scenario.values[0]
    case = wording.both(first, (second.entity, second.field, second.values[0]), scenario.actions[0])
    rest = wording.case(scenario.entity, scenario.field, None, scenario.actions[1])
    return f"{wording.policy_header}{case}\n{rest}\n"


@TASKS.register("two_fields")
class TwoFields(GatedDecision):
    """Two session fields gate the decision: each by a rule of its own, or both by one AND rule; or only one does.

    The pair's field is the first one; the second, segment `second_field`, stays as it is. The attributes say
    `second_entity`, `second_field`, `second_old` (the value in both prompts), `second_new` (its other value), `joint`,
    and with rules of their own `second_old_action` and `second_new_action`. Under an AND rule the second field holds
    the value that the rule names, so that the first decides.
    """

    joint: tuple[Joint, ...] = Field(
        ("own", "and"), description="own: a rule each; and: one rule over both; none: no rule mentions the second"
    )

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs as of `gated_decision`, with a second field."""
        for draw in self._draws("two_fields"):
            rng = draw.rng
            scenario, layout = self._scenario(rng, draw.skeleton), self._layout(rng)
            joint = rng.choice(self.joint)
            # One value is the rule's own and the other is not, whichever the base holds.
            named = rng.randint(0, 1) if joint == "and" else 0
            stated = replace(scenario, values=_turned(scenario.values, named), actions=_turned(scenario.actions, named))
            second = self._second(rng, scenario, joint)
            base, donor = (
                render_two(stated, second, (value, second.values[0]), draw.wording, layout, mode=self.mode)
                for value in scenario.values
            )
            attributes = {
                "joint": joint,
                "second_entity": second.entity,
                "second_field": second.field,
                "second_old": second.values[0],
                "second_new": second.values[1],
            }
            if joint == "own":
                attributes |= {"second_old_action": second.actions[0], "second_new_action": second.actions[1]}
            yield PromptPair(base, donor, *scenario.actions, self._provenance(draw, scenario, attributes))

    def _second(self, rng: random.Random, scenario: GatedScenario, joint: Joint) -> SecondField:
        taken = {scenario.field, *(name for name, _ in scenario.other_fields)}
        words = {*scenario.values, *scenario.actions, *(value for _, value in scenario.other_fields)}
        others = [
            other
            for other in skeletons("all")
            if other.field not in taken and words.isdisjoint((*other.values, *other.actions))
        ]
        other = rng.choice(others)
        values, actions = rng.sample(other.values, 2), rng.sample(other.actions, 2)
        return SecondField(
            other.entity,
            other.field,
            (values[0], values[1]),
            (actions[0], actions[1]),
            joint=joint,
            rule_first=rng.random() < 0.5,
            case_order=_either_order(rng),
            option_order=_either_order(rng),
        )


def _either_order(rng: random.Random) -> tuple[int, int]:
    return (0, 1) if rng.random() < 0.5 else (1, 0)


def _turned(both: tuple[str, str], first: int) -> tuple[str, str]:
    return (both[1], both[0]) if first else both
