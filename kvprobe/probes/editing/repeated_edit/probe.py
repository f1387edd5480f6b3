"""Many edits of two fields in random order, with returns to earlier values (protocol 5.5, critique ED8).

One context of task two_fields is edited again and again, each time a field drawn at random going to its other value,
and a question drawn at random is asked after each edit. All arms meet the same edits and questions.

    stale               no edit at all
    field_only          the field in place
    erratum             an erratum that says the current value; the field's earlier one is taken out
    stacked_errata      every erratum is kept, as an append-only cache keeps them
    field_and_erratum   both
    hoist_to_end        the field's line moved before the cue, and rewritten there
    full_downstream     everything after the field run anew

A decision is a `first` if the value that it turns on is not the initial one and never was before, a `return` if that
value was held earlier, and `untouched` if the field was never edited; under an AND rule the field edited last counts.

Effects, by arm: `X.correct_rate`, `X.first.correct_rate`, `X.return.correct_rate`, `X.untouched.correct_rate`, the
error rate by edits so far `X.edits_5.error_rate` (1 to 5) and so on, `X.agreement` with a prefill of the current state,
`X.margin_error` (largest, in logits), `X.token_share` of an edit in its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
from pydantic import Field

from kvprobe.edit.base import CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.erratum import erratum_name
from kvprobe.edit.splicing import appended
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.field_states import (
    BOTH,
    FIELDS,
    Question,
    TwoFieldCase,
    against_prefill,
    arms_difference,
    shared_effects,
    state_effects,
    two_field_case,
)
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_CONTRASTS = {
    "field_over_stale": ("field_only", "stale"),
    "current_over_stacked": ("erratum", "stacked_errata"),
}


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

    name: ClassVar[str] = "repeated_edit"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        "stacked_errata.first.correct_rate": PaperEntry("repeated_edit", "to_processed/stacked_erratum", "P_correct"),
        "stacked_errata.return.correct_rate": PaperEntry(
            "repeated_edit", "back_to_pending/stacked_erratum", "P_correct"
        ),
    }

    class Parameters(base.Parameters):
        """How long the chains are."""

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
            steps = chain_of(case, self.parameters.edits, f"{self.parameters.seed} {pair.base.token_hash}")
            for arm in ARMS:
                rows += [{"pair": index, **case.common, "arm": arm, **row} for row in _arm_rows(case, arm, steps)]
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Right decisions by arm, kind and number of edits, against the full prefill, and the constant baselines."""
        effects: list[Effect] = []
        window = self.parameters.window
        for arm, part in rows.groupby("arm", sort=False):
            effects += state_effects(str(arm), part, statistics)
            for kind, some in part.groupby("kind", sort=False):
                effects += state_effects(f"{arm}.{kind}", some, statistics)
            for number, some in part.groupby((part["edit"] - 1) // window):
                effects += state_effects(f"{arm}.edits_{(int(number) + 1) * window}", some, statistics)
            effects += against_prefill(str(arm), part, statistics)
        for name, arms in _CONTRASTS.items():
            effects.append(arms_difference(f"{name}.difference", rows, arms, ("pair", "edit"), statistics))
        back = rows[rows["kind"] == "return"]
        if len(back):
            arms = _CONTRASTS["current_over_stacked"]
            name = "current_over_stacked.return.difference"
            effects.append(arms_difference(name, back, arms, ("pair", "edit"), statistics))
        return [*effects, *shared_effects(rows[rows["arm"] == ARMS[-1]], statistics)]

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Error rate over the number of edits, and by kind of decision; one column for each model."""
        from kvprobe.probes.editing.repeated_edit.figure import draw_repeated_edit

        return draw_repeated_edit(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Error rate at returns to an earlier value, all models."""
        from kvprobe.probes.editing.repeated_edit.figure import repeated_edit_panel

        repeated_edit_panel(axes, panels)


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
