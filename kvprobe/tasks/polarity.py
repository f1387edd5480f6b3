"""Task `polarity`: the field's value crossed with the value the rule names, so that content and conclusion part."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Literal

from kvprobe.tasks.base import TASKS
from kvprobe.tasks.context import Context, Segment
from kvprobe.tasks.gated import GatedScenario, render
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import Skeleton
from kvprobe.tasks.pairs import PromptPair, Provenance


@TASKS.register("polarity")
class Polarity(GatedDecision):
    """The 2x2 of field value and rule trigger: the rule's first action is right if and only if the two are equal.

    Protocol 0.8 B and 2.1, critique ME6. Base and donor differ in the trigger alone: a token of the rule, segment
    `trigger`. The two other cells of the square come as variants:

        field_changed   other field, same rule text: the opposite conclusion
        both_changed    other field and other trigger: other content throughout, the same conclusion

    Field and trigger of the base are equal in half of the pairs, so neither action is right more often.
    """

    rules: tuple[Literal["trigger"], ...] = ("trigger",)
    field_slots: tuple[Literal["start"], ...] = ("start",)

    def _pair(self, rng: random.Random, skeleton: Skeleton, wording: str) -> PromptPair:
        scenario = replace(self._scenario(rng, skeleton), trigger=0)
        layout = self._layout(rng)
        value, trigger = rng.choice(scenario.values), rng.choice(scenario.values)
        other_value, other_trigger = (_other(scenario, one) for one in (value, trigger))

        def cell(field: str, named: str) -> Context:
            rule = replace(scenario, values=(named, _other(scenario, named)))
            return _marked(render(rule, field, wording, layout, mode=self.mode), named)

        first, second = scenario.actions
        answers = (first, second) if value == trigger else (second, first)
        attributes = {
            "entity": skeleton.entity,
            "field": skeleton.field,
            "value": value,
            "trigger": trigger,
            "equal": str(value == trigger),
            "mode": self.mode,
        }
        return PromptPair(
            cell(value, trigger),
            cell(value, other_trigger),
            *answers,
            Provenance(skeleton.name, wording, self.seed, attributes),
            changed="trigger",
            variants={
                "field_changed": cell(other_value, trigger),
                "both_changed": cell(other_value, other_trigger),
            },
        )


def _other(scenario: GatedScenario, value: str) -> str:
    return scenario.values[1 - scenario.values.index(value)]


def _marked(context: Context, trigger: str) -> Context:
    """The context with its policy cut into `policy`, `trigger` (the value it names) and `policy_rest`."""
    segments: list[Segment] = []
    for segment in context.segments:
        if segment.name != "policy":
            segments.append(segment)
            continue
        before, named, after = re.split(rf"( {re.escape(trigger)}\b)", segment.text, maxsplit=1)
        segments += [Segment("policy", before), Segment("trigger", named), Segment("policy_rest", after)]
    return Context(tuple(segments))
