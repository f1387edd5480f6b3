"""Task `facts`: a list of facts, early or late in the prompt, of which one is asked for (protocol 6.5)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kvprobe.tasks.base import TASKS
from kvprobe.tasks.context import Context, Segment
from kvprobe.tasks.gated import GatedScenario, Layout, pick_notes, render
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import filler_notes, skeletons
from kvprobe.tasks.pairs import PromptPair
from kvprobe.tasks.wordings import WORDINGS

Insertion = Literal["early", "late"]
FACTS = "facts"
"""The segment that holds the list."""


@TASKS.register("facts")
class Facts(GatedDecision):
    """What goes with each of many values is listed, a session line names one value, and what goes with it is asked.

    Segments are `system`, `facts` (early), `filler`, `conversation`, `facts` (late), `session`, `field`,
    `session_rest`, `task` and `cue`: the list stands before the value and is self-contained. The prompts of a scenario
    follow one another and differ in the place of the list alone. The base's value and the donor's are two of the list;
    the task offers what goes with either. Attributes say `insertion`, `facts` (how many) and `scenario`.
    """

    insertions: tuple[Insertion, ...] = Field(("early", "late"), min_length=1, description="places of the list")
    entries: Annotated[int, Field(ge=2, le=16)] = Field(6, description="facts in the list")
    notes: Annotated[int, Field(ge=0)] = Field(4, description="neutral notes between an early list and the session")
    field_slots: tuple[Literal["end"]] = Field(("end",), description="the list comes before the field")
    notes_before: tuple[Literal[0], Literal[0]] = (0, 0)
    notes_after: tuple[Literal[0], Literal[0]] = (0, 0)

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs whose `base` asks for one fact and whose `donor` for another."""
        for draw in self._draws("facts", len(self.insertions)):
            rng, wording = draw.rng, draw.wording
            scenario, insertion = self._scenario(rng, draw.skeleton), self.insertions[draw.cell]
            listed = self._listed(rng, scenario)
            layout = Layout("end", notes_after=pick_notes(filler_notes(), self.notes, rng.randrange(16)))
            facts = Segment(FACTS, WORDINGS.get(wording)().policy(scenario.entity, scenario.field, listed))
            base, donor = (
                _with_facts(render(scenario, value, wording, layout), facts, insertion) for value in scenario.values
            )
            attributes = {"insertion": insertion, "facts": str(self.entries), "scenario": str(draw.number)}
            yield PromptPair(base, donor, *scenario.actions, self._provenance(draw, scenario, attributes))

    def _listed(self, rng: random.Random, scenario: GatedScenario) -> list[tuple[str | None, str]]:
        """All facts in random order: the scenario's two and others, no value and no action twice."""
        others = [other for other in skeletons("all") if other.field != scenario.field]
        rng.shuffle(others)
        taken = {*scenario.values, *scenario.actions}
        listed: list[tuple[str | None, str]] = [*zip(scenario.values, scenario.actions, strict=True)]
        for other in others:
            value, action = rng.choice(other.values), rng.choice(other.actions)
            if len(listed) < self.entries and taken.isdisjoint((value, action)):
                listed.append((value, action))
                taken |= {value, action}
        rng.shuffle(listed)
        return listed


def _with_facts(whole: Context, facts: Segment, insertion: Insertion) -> Context:
    """The prompt with the list for its rule: in its place, behind the opening line, or right before the session."""
    segments: list[Segment] = []
    for segment in whole.segments:
        if segment.name == ("policy" if insertion == "early" else "session"):
            segments.append(facts)
        if segment.name != "policy":
            segments.append(segment)
    return Context(tuple(segments))
