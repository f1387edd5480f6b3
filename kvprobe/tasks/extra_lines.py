"""One extra line before the task block, in the wordings that the wording probe crosses (protocol 1.6, critique ED9).

All words are in the vocabulary of the organisms, and none but the value is a value or an action of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.wordings import WORDINGS


@dataclass(frozen=True)
class Subjects:
    """What an extra line may speak of: the field of an entity, its old and its new value."""

    wording: str
    entity: str
    field: str
    old: str
    new: str


def _erratum(said: Subjects, value: str) -> str:
    return WORDINGS.get(said.wording)().update(said.entity, said.field, value)


LINES: Mapping[str, Callable[[Subjects], str]] = {
    "none": lambda _: "",
    "restatement": lambda said: f"The {said.entity} {said.field} is {said.new}.\n",
    "update": lambda said: f"Update: the {said.entity} {said.field} is now {said.new}.\n",
    "override": lambda said: _erratum(said, said.new),
    "voids_conclusions": lambda said: (
        f"Never use the earlier answer; check the {said.entity} {said.field} and decide now.\n"
    ),
    "old_value": lambda said: _erratum(said, said.old),
}
"""The lines that do not depend on a tokenizer: nothing, the new value restated, the same with a tag, the erratum with
its clause that overrides the earlier value, a line that voids the earlier conclusion and names no value, and the
erratum that restates the old value."""

NAMES = (*LINES, "neutral")
"""All lines; `neutral` speaks of nothing and has as many tokens as `override`."""


def line_tokens(name: str, said: Subjects, tokenizer: Any, *, start: int = 0) -> list[int]:
    """Token ids of a line as it stands in the middle of a text.

    Args:
        name: one of `NAMES`.
        said: what it speaks of.
        tokenizer: a Hugging Face tokenizer.
        start: the note that a neutral line begins with, so that not all pairs have the same one.
    """
    if name != "neutral":
        return encode_segment(LINES[name](said), tokenizer)
    override = line_tokens("override", said, tokenizer)
    notes = filler_notes()
    first = start % len(notes)
    text = encode_segment(" ".join([*notes[first:], *notes[:first]]), tokenizer)
    # Cut wherever the length is reached, and ended as the override line is: the length is what must be equal.
    return text[: len(override) - 1] + override[-1:]
