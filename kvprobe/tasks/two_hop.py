"""Task `two_hop`: a record puts an item into a room, a directory says who owns which room, the owner is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pydantic import Field

from kvprobe.tasks.base import TASKS, Range, Task
from kvprobe.tasks.context import Context
from kvprobe.tasks.pairs import PromptPair, Provenance
from kvprobe.tasks.words import neutral_lines, off_template_words


@TASKS.register("two_hop")
class TwoHop(Task):
    """The field names an item's room, and the decision is who owns that room (protocol 0.8 E 1).

    The directory of three rooms comes after the field. Rooms and owners are drawn afresh for every pair, and the
    item is the skeleton.
    """

    size: int = Field(60, ge=1, description="number of pairs")
    seed: int = Field(0, ge=0)
    notes: Range = Field((4, 8), description="fewest and most neutral notes after the directory")

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs whose `base` puts the item into one room and whose `donor` into another."""
        items = list(off_template_words().items)
        random.Random(self.seed).shuffle(items)
        for index in range(self.size):
            rng = random.Random(f"two_hop {self.seed} {index}")
            yield self._pair(rng, items[index % len(items)])

    def _pair(self, rng: random.Random, item: str) -> PromptPair:
        words = off_template_words()
        rooms, owners = rng.sample(words.places, 3), rng.sample(words.owners, 3)
        directory = [f"The owner of room {room} is the {owner}.\n" for room, owner in zip(rooms, owners, strict=True)]
        rng.shuffle(directory)
        first, second = rng.sample(owners[:2], 2)
        filler = neutral_lines(rng, *self.notes)
        base, donor = (
            Context.of(
                ("session", f"Record\nThe {item} is in room"),
                ("field", f" {room}"),
                ("session_rest", ".\n"),
                ("directory", "".join(directory)),
                ("filler", filler),
                ("task", f"Task: find the owner of the room that the {item} is in. Reply with {first} or {second}.\n"),
                ("cue", "Answer:"),
            )
            for room in rooms[:2]
        )
        attributes = {"template": "two_hop", "old": rooms[0], "new": rooms[1], "mode": "direct"}
        return PromptPair(base, donor, owners[0], owners[1], Provenance(item, "two_hop", self.seed, attributes))
