"""Task `agent_turns`: a policy, a state and a conversation whose turns change either (critique UA1, UA2)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from pydantic import Field

from kvprobe.tasks.base import TASKS
from kvprobe.tasks.context import Context, Segment
from kvprobe.tasks.gated import GatedScenario, render
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import Skeleton
from kvprobe.tasks.pairs import PromptPair, Provenance
from kvprobe.tasks.wordings import WORDINGS

CHANGES = ("field", "rule", "both", "none")
"""What a turn may change: the state, the cases of the policy, both, or neither."""


@TASKS.register("agent_turns")
class AgentTurns(GatedDecision):
    """A conversation of several turns under a policy, in which the state and the policy itself change.

    Base and donor are the first turn under either state. The policy stands before the state, so that it is a chunk of
    its own, and is cut into `policy` (its header), `rule` (its two cases) and `filler`. The variants exchange the
    actions of the cases:

        rule_changed   the base's state: the donor's answer is right
        both_changed   the donor's state: the base's answer is right

    Attribute `changes` says for each turn what changes before it (`CHANGES`, dealt in shuffled rounds; never before the
    first turn).
    """

    rules: tuple[Literal["cases"], ...] = ("cases",)
    field_slots: tuple[Literal["after_policy", "after_filler"], ...] = ("after_filler",)
    turns: int = Field(6, ge=1, description="turns of a conversation")

    def _pair(self, rng: random.Random, skeleton: Skeleton, wording: str) -> PromptPair:
        scenario, layout = self._scenario(rng, skeleton), self._layout(rng)
        exchanged = replace(scenario, actions=(scenario.actions[1], scenario.actions[0]))
        # The options are offered in the same order whatever the rule says.
        exchanged = replace(exchanged, option_order=(scenario.option_order[1], scenario.option_order[0]))

        def prompt(rule: GatedScenario, value: str) -> Context:
            return _cut(render(rule, value, wording, layout, mode=self.mode), wording)

        old, new = scenario.values
        attributes = {
            "entity": skeleton.entity,
            "field": skeleton.field,
            "old": old,
            "new": new,
            "mode": self.mode,
            "slot": layout.field_slot,
            "changes": " ".join(_dealt(rng, self.turns)),
        }
        return PromptPair(
            prompt(scenario, old),
            prompt(scenario, new),
            *scenario.actions,
            Provenance(skeleton.name, wording, self.seed, attributes),
            variants={"rule_changed": prompt(exchanged, old), "both_changed": prompt(exchanged, new)},
        )


def _cut(context: Context, wording: str) -> Context:
    """The context with its policy cut into `policy`, where it has a header, and `rule`."""
    header, segments = WORDINGS.get(wording)().policy_header, list[Segment]()
    for segment in context.segments:
        if segment.name != "policy":
            segments.append(segment)
            continue
        if header:
            segments.append(Segment("policy", header))
        segments.append(Segment("rule", segment.text.removeprefix(header)))
    return Context(tuple(segments))


def _dealt(rng: random.Random, turns: int) -> list[str]:
    """What changes before each turn; each round of `CHANGES` in an order of its own."""
    dealt = ["none"]
    while len(dealt) < turns:
        dealt += rng.sample(CHANGES, len(CHANGES))
    return dealt[:turns]
