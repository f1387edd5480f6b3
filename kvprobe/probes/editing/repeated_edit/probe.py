"""Many edits of two fields in random order, with returns to earlier values (protocol 5.5, critique ED8).

One context of task two_fields is edited again and again: each edit sets a field drawn at random to its other value,
and is followed by a question drawn at random. All arms see the same edits and questions.

    stale               no edit at all
    field_only          the field in place
    erratum             an erratum with the current value; the field's earlier erratum is removed
    stacked_errata      every erratum is kept, as an append-only cache keeps them
    field_and_erratum   the field in place and an erratum
    hoist_to_end        the field's line moved before the cue, and rewritten there
    full_downstream     everything after the field recomputed

A decision is `untouched` if the field it turns on was never edited, `first` if that field holds its new value for the
first time, and `return` if it is back at a value that it held before. Under an AND rule the field edited last counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvprobe.edit.base import CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.erratum import erratum_name
from kvprobe.edit.splicing import appended
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.field_states import BOTH, FIELDS, Question, TwoFieldCase, two_field_case
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

ARMS = (
    "stale",
    "field_only",
    "stacked_errata",
    "erratum",
    "field_and_erratum",
    "hoist_to_end",
    "full_downstream",
)
KINDS = ("untouched", "first", "return")


class StackedErrata(EditMethod):
    """Append an erratum and keep all earlier ones: what a cache that can only grow would hold."""

    name: ClassVar[str] = "stacked_errata"

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The stale cache up to the task, then the erratum under a name of its own, and the task."""
        held = sum(name.startswith(erratum_name("")) for name in stale.spans)
        return appended(subject, stale, edit, edit.erratum_ids, f"{erratum_name(edit.field)} {held + 1}")

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """The erratum and the task block."""
        return len(edit.erratum_ids) + len(stale.cache) - stale.span(edit.insert_before).start


@dataclass(frozen=True)
class Step:
    """One edit of the chain and the question after it."""

    number: int
    field: str
    value: str
    question: Question
    kind: str


@PROBES.register("repeated_edit")
class RepeatedEdit(Probe):
    """Whether decisions follow the current state through a long chain of edits, by every method."""

    edits: int = Field(20, ge=1, description="edits of one context")
    window: int = Field(5, ge=1, description="edits that one error rate over the chain is taken over")
    seed: int = Field(0, ge=0, description="of the order of edits and questions")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each arm and edit.

        Raises:
            ConfigError: a pair is not one of task two_fields.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            case = two_field_case(subject, pair)
            steps = chain_of(case, self.edits, f"{self.seed} {pair.base.token_hash}")
            for arm in ARMS:
                rows += [{"pair": index, **case.common, "arm": arm, **row} for row in _arm_rows(case, arm, steps)]
            progress(index + 1, len(pairs))
        return rows


def chain_of(case: TwoFieldCase, edits: int, seed: str) -> list[Step]:
    """Edits in random order, each to the field's other value, with a random question after each."""
    rng, steps = random.Random(seed), []
    counts = dict.fromkeys(FIELDS, 0)
    for number in range(1, edits + 1):
        field = rng.choice(FIELDS)
        counts[field] += 1
        question = rng.choice(case.questions)
        held = counts[field if question.name == BOTH else question.name]
        steps.append(Step(number, field, case.values[field][counts[field] % 2], question, KINDS[min(held, 2)]))
    return steps


def _arm_rows(case: TwoFieldCase, arm: str, steps: Sequence[Step]) -> Iterator[Measurement]:
    method: str | EditMethod = StackedErrata() if arm == "stacked_errata" else arm
    context = case.context.copy()
    for step in steps:
        cost = context.set(step.field, step.value, method)
        yield {
            "edit": step.number,
            "edited": step.field,
            "kind": step.kind,
            "token_share": None if arm == "stale" else cost.fraction,
            "prompt_tokens": cost.prompt_tokens,
            **case.row(context, step.question),
        }
