"""Task `shared_actions`: many scenarios that decide between the same few pairs of actions."""

from __future__ import annotations

import random
from dataclasses import replace

from pydantic import Field

from kvprobe.tasks.base import TASKS
from kvprobe.tasks.gated import GatedScenario
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import Skeleton, skeletons


@TASKS.register("shared_actions")
class SharedActions(GatedDecision):
    """Gated decisions whose scenarios share their actions, so that prompts of different ones share a conclusion.

    Domain, entity, field, values and request are the skeleton's own. Which action goes with which value is drawn for
    each pair, so no field or value tells the conclusion without the rule.
    """

    actions: tuple[tuple[str, str], ...] = Field(
        (("approve", "reject"), ("accept", "decline")), min_length=1, description="pairs of actions, used evenly"
    )

    def _scenario(self, rng: random.Random, skeleton: Skeleton) -> GatedScenario:
        library = [one.name for one in skeletons(self.split)]
        random.Random(self.seed).shuffle(library)
        # Wordings go round the shuffled library one by one, so every wording meets every pair of actions as often.
        place = library.index(skeleton.name) // len(self.wordings)
        return super()._scenario(rng, replace(skeleton, actions=self.actions[place % len(self.actions)]))
