"""A field deleted from a cached prompt: does the decision still follow it, through its notes?

Both prompts of a pair lose the field's line, and then say the same. Where the deletion is complete, so do their
decisions; what is left of the difference between them has leaked through entries that read the line before it went.

    none           nothing is deleted
    gap            the line's entries go, the others stay where they are, as under eviction
    rotated        the entries behind it are moved up
    rotated_then   and the first `count` of them are run again
    recomputed     all of them are run again
    void           nothing is deleted; a line before the task says that the field is void
    rotated_void   the line's entries go, and a line before the task says that the field is void
    policy_too     the rule's entries go as well
    other_line     another session line goes in its stead
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from kvprobe.edit.base import CachedPrompt
from kvprobe.edit.context import EditableContext
from kvprobe.edit.fields import pair_fields
from kvprobe.engine.operations import recompute
from kvprobe.engine.readout import read
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.edit_cases import edit_case
from kvprobe.probes.kit.pair_lines import subjects_of
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import WORDINGS

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FIELD = "field"
VOID = "void"
"""What the line says that takes the field back; a word that organisms know."""
_Deletion = Callable[["_Deleting"], CachedPrompt]


@PROBES.register("removal")
class Removal(Probe):
    """Deletions of a field from the cache of a prompt."""

    counts: tuple[PositiveInt, ...] = Field(
        (8, 16, 32, 64), min_length=1, description="how many of the entries behind the line are run again"
    )

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each arm that its prompts allow.

        Raises:
            ConfigError: a pair does not say its entity, field and values.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            common = {"pair": index, **edit_case(subject, pair).common()}
            sides = [_Deleting(subject, pair, value) for value in (0, 1)]
            rows += [{**common, **row} for row in self._rows(pair, sides)]
            progress(index + 1, len(pairs))
        return rows

    def _rows(self, pair: Pair, sides: Sequence[_Deleting]) -> Iterator[Measurement]:
        for arm, delete in _ARMS.items():
            if arm != "other_line" or "session_rest" in sides[0].context.prompt.spans:
                yield {"arm": arm, **_decided(pair, sides, delete)}
        for count in self.counts:
            yield {"arm": "rotated_then", "count": count, **_decided(pair, sides, partial(_Deleting.then, count=count))}


class _Deleting:
    """One prompt of a pair, from whose cache things are deleted."""

    def __init__(self, subject: Subject, pair: Pair, side: int) -> None:
        said, (field, *_) = subjects_of(pair), pair_fields(pair)
        prompt, value = ((pair.base, said.old), (pair.donor, said.new))[side]
        self.subject = subject
        self.context = EditableContext.from_prompt(subject, prompt, [replace(field, value=value)])
        self._void = WORDINGS.get(said.wording)().update(said.entity, said.field, VOID)

    def remove(self, behind: str, *names: str) -> EditableContext:
        context = self.context.copy()
        for name in names:
            context.remove(name, behind)  # type: ignore[arg-type]
        return context

    def voided(self, context: EditableContext) -> CachedPrompt:
        context.insert(VOID, self._void, before="task")
        return context.prompt

    def then(self, count: int) -> CachedPrompt:
        place = self.context.prompt.span(f"before {FIELD}").start
        prompt = self.remove("rotated", FIELD).prompt
        again = range(place, min(place + count, len(prompt.cache)))
        return replace(prompt, cache=recompute(self.subject, prompt.cache, prompt.token_ids[:-1], again)[0])


_ARMS: dict[str, _Deletion] = {
    "none": lambda side: side.context.prompt,
    "gap": lambda side: side.remove("gap", FIELD).prompt,
    "rotated": lambda side: side.remove("rotated", FIELD).prompt,
    "recomputed": lambda side: side.remove("recomputed", FIELD).prompt,
    "void": lambda side: side.voided(side.context.copy()),
    "rotated_void": lambda side: side.voided(side.remove("rotated", FIELD)),
    "policy_too": lambda side: side.remove("rotated", FIELD, "policy").prompt,
    "other_line": lambda side: side.remove("rotated", "session_rest").prompt,
}


def _decided(pair: Pair, sides: Sequence[_Deleting], delete: _Deletion) -> Measurement:
    """Margins of both prompts after a deletion, in logits, and whether each is decided by the value it had."""
    answers = pair.base_answer_id, pair.donor_answer_id
    base, donor = (read(delete(side).decide(side.subject).logits, *answers).margin for side in sides)
    return {
        "margin_of_base": base,
        "margin_of_donor": donor,
        "follows_base": base < 0,
        "follows_donor": donor > 0,
    }
