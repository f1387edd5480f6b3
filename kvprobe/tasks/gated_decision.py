"""Task `gated_decision`: pairs of the gated decision over the whole scenario library."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvprobe.errors import did_you_mean
from kvprobe.tasks.base import TASKS, Range, Task, at_most
from kvprobe.tasks.gated import FieldSlot, GatedScenario, Layout, Mode, Rule, pick_notes, render
from kvprobe.tasks.library import Skeleton, Split, filler_notes, skeletons
from kvprobe.tasks.pairs import PromptPair, Provenance
from kvprobe.tasks.wordings import WORDINGS


@dataclass(frozen=True)
class Draw:
    """What one pair is made from.

    Attributes:
        number: of its scenario.
        cell: of its layout among those of the scenario.
        rng: begins anew for every pair, in the same way for all of one scenario.
    """

    number: int
    cell: int
    rng: random.Random
    skeleton: Skeleton
    wording: str


@TASKS.register("gated_decision")
class GatedDecision(Task):
    """A session field decides, through a rule, between two actions; skeletons are visited evenly."""

    size: int = Field(60, ge=1, description="number of pairs")
    seed: int = Field(0, ge=0)
    split: Split = Field("held_out", description="held_out skeletons were never shown to the organisms")
    skeletons: tuple[str, ...] | None = Field(None, description="names of those to visit; all of the split by default")
    wordings: tuple[str, ...] = ("manual", "memo", "dialogue")
    rules: tuple[Rule, ...] = ("cases",)
    field_slots: tuple[FieldSlot, ...] = ("start",)
    mode: Mode = "direct"
    notes_before: Range = Field((0, 3), description="fewest and most neutral notes before the policy")
    notes_after: Range = Field((0, 3), description="fewest and most neutral notes after the policy")
    other_fields: Annotated[Range, at_most(24)] = Field((0, 2), description="fewest and most further session lines")
    polarity: Literal["random", "library"] = Field(
        "random", description="random: which action goes with which value is drawn for each pair"
    )

    @field_validator("wordings")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            WORDINGS.get(name)
        return names

    @model_validator(mode="after")
    def _of_the_split(self) -> Self:
        known = [skeleton.name for skeleton in skeletons(self.split)]
        for name in self.skeletons or ():
            if name not in known:
                raise ValueError(f"skeletons: the split {self.split!r} has no {name!r}; {did_you_mean(name, known)}")
        return self

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs whose `base` holds one value of the field and whose `donor` holds the other."""
        for draw in self._draws("gated_decision"):
            yield self._pair(draw.rng, draw.skeleton, draw.wording)

    def _draws(self, task: str, cells: int = 1) -> Iterator[Draw]:
        """What each pair is made from; `cells` pairs that follow one another share a scenario and differ in layout."""
        library = [each for each in skeletons(self.split) if self.skeletons is None or each.name in self.skeletons]
        random.Random(self.seed).shuffle(library)
        for index in range(self.size):
            number, cell = divmod(index, cells)
            # Wording advances once per round of the library, so every skeleton meets every wording.
            wording = self.wordings[(number + number // len(library)) % len(self.wordings)]
            rng = random.Random(f"{task} {self.seed} {number}")
            yield Draw(number, cell, rng, library[number % len(library)], wording)

    def _provenance(self, draw: Draw, scenario: GatedScenario, attributes: Mapping[str, str]) -> Provenance:
        """A pair's, with what every pair of a gated decision says of itself and `attributes` beside it."""
        told = {
            "entity": scenario.entity,
            "field": scenario.field,
            "old": scenario.values[0],
            "new": scenario.values[1],
            "mode": self.mode,
        }
        return Provenance(draw.skeleton.name, draw.wording, self.seed, {**told, **attributes})

    def _pair(self, rng: random.Random, skeleton: Skeleton, wording: str) -> PromptPair:
        scenario = self._scenario(rng, skeleton)
        layout = self._layout(rng)
        old, new = scenario.values
        base, donor = (render(scenario, value, wording, layout, mode=self.mode) for value in (old, new))
        attributes = {
            "entity": skeleton.entity,
            "field": skeleton.field,
            "old": old,
            "new": new,
            "rule": scenario.rule,
            "slot": layout.field_slot,
            "mode": self.mode,
        }
        return PromptPair(base, donor, *scenario.actions, Provenance(skeleton.name, wording, self.seed, attributes))

    def _scenario(self, rng: random.Random, skeleton: Skeleton) -> GatedScenario:
        old, new = rng.sample(skeleton.values, 2)
        first, second = skeleton.actions
        if self.polarity == "random" and rng.random() < 0.5:
            first, second = second, first
        case_order: tuple[int, int] = (0, 1) if rng.random() < 0.5 else (1, 0)
        option_order: tuple[int, int] = (0, 1) if rng.random() < 0.5 else (1, 0)
        others = [other for other in skeletons("all") if other.field != skeleton.field]
        chosen = rng.sample(others, rng.randint(*self.other_fields))
        return GatedScenario(
            skeleton.domain,
            skeleton.entity,
            skeleton.field,
            (old, new),
            (first, second),
            skeleton.request,
            rule=rng.choice(self.rules),
            trigger=rng.randint(0, 1),
            case_order=case_order,
            option_order=option_order,
            other_fields=tuple((other.field, rng.choice(other.values)) for other in chosen),
        )

    def _layout(self, rng: random.Random) -> Layout:
        notes = filler_notes()
        before, after = rng.randint(*self.notes_before), rng.randint(*self.notes_after)
        return Layout(
            rng.choice(self.field_slots),
            pick_notes(notes, before, rng.randrange(len(notes))),
            pick_notes(notes, after, rng.randrange(len(notes))),
        )
