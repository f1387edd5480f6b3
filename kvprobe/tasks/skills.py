"""Task `skills`: a library of several rules stands in the prompt, and one of them decides (protocol 6.4)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from kvprobe.tasks.base import TASKS
from kvprobe.tasks.context import Context, Segment
from kvprobe.tasks.gated import GatedScenario, Layout, pick_notes, render
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import filler_notes, skeletons
from kvprobe.tasks.pairs import PromptPair
from kvprobe.tasks.wordings import WORDINGS, Wording


def skill_name(place: int) -> str:
    """The segment of the skill at a place in the order, from 0 on."""
    return f"skill_{place}"


def separator_name(place: int) -> str:
    """The segment between the skill at `place` and the next one."""
    return f"separator_{place}"


@TASKS.register("skills")
class Skills(GatedDecision):
    """One of several rules about different entities and fields decides by the session's one field.

    The prompts of a scenario follow one another and differ in how many skills there are; a larger library holds the
    smaller one's skills and more. Segments are `system`, then the skills with a neutral line between each two, then
    `session`, `field`, `session_rest`, `conversation`, `task` and `cue`: every rule comes before the field and is
    self-contained. The deciding rule moves on by one place from scenario to scenario. Attributes say `skills`, `place`
    (of the deciding one, from 0 on) and `scenario`.
    """

    counts: tuple[Annotated[int, Field(ge=1, le=16)], ...] = Field(
        (1, 2, 4, 8), min_length=1, description="levels: skills in a prompt"
    )
    field_slots: tuple[Literal["after_policy"]] = Field(("after_policy",), description="rules come before the field")
    notes_before: tuple[Literal[0], Literal[0]] = (0, 0)
    notes_after: tuple[Literal[0], Literal[0]] = (0, 0)

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs whose `base` holds one value of the field and whose `donor` holds the other."""
        for draw in self._draws("skills", len(self.counts)):
            scenario = self._scenario(draw.rng, draw.skeleton)
            others = self._others(draw.rng, scenario, max(self.counts) - 1)
            count = self.counts[draw.cell]
            place = draw.number % count
            base, donor = (
                _rendered(scenario, others[: count - 1], value, draw.wording, place) for value in scenario.values
            )
            attributes = {"skills": str(count), "place": str(place), "scenario": str(draw.number)}
            yield PromptPair(base, donor, *scenario.actions, self._provenance(draw, scenario, attributes))

    def _others(self, rng: random.Random, scenario: GatedScenario, count: int) -> list[GatedScenario]:
        """Scenarios of other entities, fields, values and actions than the deciding one's; their fields all differ."""
        words = {*scenario.values, *scenario.actions}
        library = list(skeletons("all"))
        rng.shuffle(library)
        chosen: dict[str, GatedScenario] = {}
        for other in library:
            free = words.isdisjoint((*other.values, *other.actions))
            if other.entity != scenario.entity and other.field != scenario.field and free:
                chosen.setdefault(other.field, self._scenario(rng, other))
        return list(chosen.values())[:count]


def _rendered(
    scenario: GatedScenario, others: Sequence[GatedScenario], value: str, wording: str, place: int
) -> Context:
    style, whole = WORDINGS.get(wording)(), render(scenario, value, wording, Layout("after_policy"))
    skills = [_rule(style, other) for other in others]
    skills.insert(place, _rule(style, scenario))
    segments: list[Segment] = []
    for segment in whole.segments:
        segments += _with_separators(style, skills) if segment.name == "policy" else [segment]
    return Context(tuple(segments))


def _rule(style: Wording, scenario: GatedScenario) -> str:
    return style.policy(scenario.entity, scenario.field, scenario.cases())


def _with_separators(style: Wording, skills: Sequence[str]) -> Iterator[Segment]:
    notes = pick_notes(filler_notes(), len(skills), 0)
    for place, (text, note) in enumerate(zip(skills, notes, strict=True)):
        yield Segment(skill_name(place), text)
        if place < len(skills) - 1:
            yield Segment(separator_name(place), style.filler([note]))
