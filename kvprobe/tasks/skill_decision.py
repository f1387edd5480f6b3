"""Task `skill_decision`: the gated decision as a skill, with other text ahead of it (protocol 7)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from kvprobe.tasks.base import TASKS, Range
from kvprobe.tasks.context import Context, Segment
from kvprobe.tasks.gated import pick_notes
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import Skeleton, filler_notes
from kvprobe.tasks.pairs import PromptPair
from kvprobe.tasks.wordings import WORDINGS

AHEAD = "ahead"
"""The segment with the other text, and the attribute that says how many notes it has."""


@TASKS.register("skill_decision")
class SkillDecision(GatedDecision):
    """A session line and its rule after neutral notes, as many as drawn for each pair: a skill that has to be moved.

    The skill is what stands from `session` to before `conversation`; the notes stand between `system` and it.
    """

    field_slots: tuple[Literal["start"]] = ("start",)
    notes_ahead: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 2, 8), min_length=1, description="levels: neutral notes ahead of the skill"
    )
    notes_before: Range = Field((0, 2), description="fewest and most neutral notes before the rule")
    notes_after: Range = Field((0, 2), description="fewest and most neutral notes after it, in the skill")

    def _pair(self, rng: random.Random, skeleton: Skeleton, wording: str) -> PromptPair:
        pair = super()._pair(rng, skeleton, wording)
        count = rng.choice(self.notes_ahead)
        notes = pick_notes(filler_notes(), count, rng.randrange(len(filler_notes())))
        segment = Segment(AHEAD, WORDINGS.get(wording)().filler(notes))
        base, donor = (_put_ahead(context, segment) for context in (pair.base, pair.donor))
        attributes = {**pair.scenario.attributes, AHEAD: str(count)}
        return replace(pair, base=base, donor=donor, scenario=replace(pair.scenario, attributes=attributes))


def _put_ahead(context: Context, segment: Segment) -> Context:
    return context.insert_before("session", segment) if segment.text else context
