"""Task `field_position`: the gated decision crossed over the field's place, its distance and its mentions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from pydantic import Field

from kvprobe.tasks.base import TASKS
from kvprobe.tasks.gated import FieldSlot, GatedScenario, Layout, pick_notes, render
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.pairs import PromptPair

# Neutral notes that name the field without its value.
_MENTIONS = (
    "Do not guess the {entity} {field}.",
    "Write the {entity} {field} in plain words.",
    "Mention the {entity} {field} when asked.",
    "Repeat the {entity} {field} in one short line.",
)


@TASKS.register("field_position")
class FieldPosition(GatedDecision):
    """The gated decision in every cell of field slot x notes x mentions (protocol 1.2, critique ME2).

    The cells of a scenario follow one another and differ in their layout alone. In slot `start` half of the neutral
    notes stand between field and rule and half between rule and decision; in `after_policy`, which puts the rule
    first, all of them stand between field and decision. In `after_filler` and `end` they stand before the field, so
    that only its distance changes and not the length of the prompt.
    """

    field_slots: tuple[FieldSlot, ...] = Field(("start",), min_length=1)
    notes: tuple[int, ...] = Field((2, 6), min_length=1, description="levels: neutral notes in a prompt")
    mentions: tuple[int, ...] = Field((0, 2), min_length=1, description="levels: how many notes name the field")
    notes_before: tuple[Literal[0], Literal[0]] = Field((0, 0), description="set by `notes`")
    notes_after: tuple[Literal[0], Literal[0]] = Field((0, 0), description="set by `notes`")

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs whose `base` holds one value of the field and whose `donor` holds the other."""
        cells = list(product(self.field_slots, self.notes, self.mentions))
        for draw in self._draws("field_position", len(cells)):
            scenario, start = self._scenario(draw.rng, draw.skeleton), draw.rng.randrange(len(filler_notes()))
            slot, notes, mentions = cells[draw.cell]
            layout = _layout_of(slot, _notes(scenario, notes, mentions, start))
            base, donor = (render(scenario, value, draw.wording, layout, mode=self.mode) for value in scenario.values)
            attributes = {
                "scenario": str(draw.number),
                "slot": slot,
                "notes": str(notes),
                "mentions": str(mentions),
            }
            yield PromptPair(base, donor, *scenario.actions, self._provenance(draw, scenario, attributes))


def _notes(scenario: GatedScenario, count: int, mentions: int, start: int) -> tuple[str, ...]:
    """`count` notes of which `mentions`, evenly spread, name the field."""
    notes = list(pick_notes(filler_notes(), count, start))
    naming = min(mentions, count)
    for number, text in enumerate(pick_notes(_MENTIONS, naming, start)):
        place = (2 * number + 1) * count // (2 * naming)
        notes[place] = text.format(entity=scenario.entity, field=scenario.field)
    return tuple(notes)


def _layout_of(slot: FieldSlot, notes: tuple[str, ...]) -> Layout:
    if slot == "start":
        return Layout(slot, notes[: len(notes) // 2], notes[len(notes) // 2 :])
    return Layout(slot, notes_after=notes)
