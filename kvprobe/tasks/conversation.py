"""Task `conversation`: the gated decision as a talk between people, without session block or policy block."""

from __future__ import annotations

import random
from typing import Literal

from kvprobe.tasks.base import TASKS
from kvprobe.tasks.context import Context
from kvprobe.tasks.gated import GatedScenario, Layout
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import Skeleton
from kvprobe.tasks.pairs import PromptPair, Provenance
from kvprobe.tasks.wordings import WORDINGS


@TASKS.register("conversation")
class Conversation(GatedDecision):
    """A user asks, a clerk knows the field and a manager the rule, and they talk on (protocol 0.8 E 3).

    Field and rule are said as in the wording `dialogue`; the order of the turns and all others are its own.
    """

    wordings: tuple[Literal["dialogue"], ...] = ("dialogue",)
    field_slots: tuple[Literal["start"], ...] = ("start",)
    mode: Literal["direct"] = "direct"
    other_fields: tuple[Literal[0], Literal[0]] = (0, 0)

    def _pair(self, rng: random.Random, skeleton: Skeleton, wording: str) -> PromptPair:
        scenario, layout = self._scenario(rng, skeleton), self._layout(rng)
        old, new = scenario.values
        base, donor = (_talk(scenario, value, layout) for value in (old, new))
        attributes = {
            "template": "conversation",
            "entity": skeleton.entity,
            "field": skeleton.field,
            "old": old,
            "new": new,
            "mode": self.mode,
        }
        return PromptPair(base, donor, *scenario.actions, Provenance(skeleton.name, wording, self.seed, attributes))


def _talk(scenario: GatedScenario, value: str, layout: Layout) -> Context:
    entity, field, style = scenario.entity, scenario.field, WORDINGS.get("dialogue")()
    before, after = style.record(entity, field)
    first, second = (scenario.actions[i] for i in scenario.option_order)
    return Context.of(
        ("opening", f"User: {scenario.request}.\nAssistant: I will look at the {entity}.\n"),
        ("session", before),
        ("field", f" {value}"),
        ("session_rest", after),
        ("filler_before", _turns("Assistant", layout.notes_before)),
        ("policy", style.policy(entity, field, scenario.cases())),
        ("filler", _turns("Clerk", layout.notes_after)),
        ("conversation", f"Assistant: I will check the {field}.\n"),
        ("task", f"User: So decide by the {field}. Reply with {first} or {second}.\n"),
        ("cue", "Answer:"),
    )


def _turns(speaker: str, notes: tuple[str, ...]) -> str:
    return "".join(f"{speaker}: {note}\n" for note in notes)
