"""Task `lookup`: a directory of three items and their desks, a session that names one item, its desk is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pydantic import Field

from kvprobe.tasks.base import TASKS, Range, Task
from kvprobe.tasks.context import Context
from kvprobe.tasks.pairs import PromptPair, Provenance
from kvprobe.tasks.words import neutral_lines, off_template_words


@TASKS.register("lookup")
class Lookup(Task):
    """The field names an entry of a directory, and the decision is what stands in that entry (protocol 0.8 E 2).

    The directory comes before the field, so the field is nearly the answer. The base's item is the skeleton; the
    others and all desks are drawn afresh for every pair.
    """

    size: int = Field(60, ge=1, description="number of pairs")
    seed: int = Field(0, ge=0)
    notes: Range = Field((4, 8), description="fewest and most neutral notes after the session")

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs whose `base` names one item and whose `donor` another."""
        items = list(off_template_words().items)
        random.Random(self.seed).shuffle(items)
        for index in range(self.size):
            rng = random.Random(f"lookup {self.seed} {index}")
            yield self._pair(rng, items[index % len(items)])

    def _pair(self, rng: random.Random, item: str) -> PromptPair:
        words = off_template_words()
        items = [item, *rng.sample([other for other in words.items if other != item], 2)]
        desks = rng.sample(words.places, 3)
        directory = [f"The {entry} is at desk {desk}.\n" for entry, desk in zip(items, desks, strict=True)]
        rng.shuffle(directory)
        first, second = rng.sample(desks[:2], 2)
        filler = neutral_lines(rng, *self.notes)
        base, donor = (
            Context.of(
                ("directory", "Record\n" + "".join(directory)),
                ("session", "Session\nThe person wants the"),
                ("field", f" {wanted}"),
                ("session_rest", ".\n"),
                ("filler", filler),
                ("task", f"Task: find the desk for this person. Reply with {first} or {second}.\n"),
                ("cue", "Answer:"),
            )
            for wanted in items[:2]
        )
        attributes = {"template": "lookup", "old": items[0], "new": items[1], "mode": "direct"}
        return PromptPair(base, donor, desks[0], desks[1], Provenance(item, "lookup", self.seed, attributes))
