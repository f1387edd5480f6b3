"""Task `picture_question`: one question about a picture, whose two versions differ in what is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from kvprobe.tasks.base import TASKS, Range, Task, at_most
from kvprobe.tasks.context import Context
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.pairs import PromptPair, Provenance
from kvprobe.tasks.pictures import ASKED, ATTRIBUTES, Picture

IMAGE, OTHER = "image", "other"
"""Segments whose text describes a picture; a probe puts the picture itself in their place."""
ORDINALS = ("one", "two")


@TASKS.register("picture_question")
class PictureQuestion(Task):
    """Which colour or shape a picture has; text, or another picture, may stand before it.

    The segment `image` (and `other`) holds the picture's description, so that a pair lines up like any other; only a
    probe that draws the pictures, such as `image_splice`, asks about images.
    """

    size: int = Field(48, ge=1, description="number of pairs")
    seed: int = Field(0, ge=0)
    notes: Annotated[Range, at_most(len(filler_notes()))] = Field(
        (1, 3), description="fewest and most lines of text before the pictures"
    )
    pictures: Literal[1, 2] = Field(1, description="pictures in a prompt, of which one is asked for")

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs whose `base` holds one picture and whose `donor` holds another that differs in what is asked for."""
        for index in range(self.size):
            rng = random.Random(f"picture_question {self.seed} {index}")
            attribute = ASKED[index % len(ASKED)]
            yield self._pair(rng, attribute)

    def _pair(self, rng: random.Random, attribute: str) -> PromptPair:
        old, new = rng.sample(ATTRIBUTES[attribute], 2)
        values = {name: rng.choice(known) for name, known in ATTRIBUTES.items()}
        base, donor = Picture(**{**values, attribute: old}), Picture(**{**values, attribute: new})
        # The other picture has a third answer, so that reading it is not mistaken for reading either of the two.
        rest = [value for value in ATTRIBUTES[attribute] if value not in (old, new)]
        other = Picture(
            **{name: rng.choice(known) for name, known in ATTRIBUTES.items()} | {attribute: rng.choice(rest)}
        )
        asked = rng.randrange(self.pictures)
        notes = rng.sample(filler_notes(), rng.randint(*self.notes))
        shown = [[picture, other][: self.pictures] for picture in (base, donor)]
        contexts = [picture_context(notes, each[::-1] if asked else each, asked, attribute) for each in shown]
        between = " and ".join(sorted((old, new)))
        details = {"attribute": attribute, "asked": ORDINALS[asked], "pictures": str(self.pictures)}
        # Shapes in different corners lie in different image tokens, so that they are pictures of their own.
        skeleton = f"{attribute}: {between}, {base.corner}"
        scenario = Provenance(skeleton, "question", rng.randrange(2**31), details)
        return PromptPair(contexts[0], contexts[1], old, new, scenario, changed=IMAGE)


def picture_context(notes: Sequence[str], pictures: Sequence[Picture], asked: int, attribute: str) -> Context:
    """The prompt: notes, each picture after its label, a question about number `asked`, the cue of the answer."""
    segments = [("notes", "".join(f"- {note}\n" for note in notes))]
    for place, picture in enumerate(pictures):
        name = IMAGE if place == asked else OTHER
        line = "\n" if place else ""
        segments.append((f"label_{name}", f"{line}Picture {ORDINALS[place]}:"))
        segments.append((name, f" {picture.words}"))
    segments.append(("question", f"\nQuestion: which {attribute} has picture {ORDINALS[asked]}?\n"))
    segments.append(("cue", "Answer:"))
    return Context.of(*segments)
