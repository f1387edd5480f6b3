"""Two fields edited in one context (protocol 5.5): does each edit turn what it must and leave the rest?

From the base prompt of a pair of task two_fields, nothing, the first field, the second, or both (one after the other)
are changed by each method, and every question is asked after it. The right answer is that of the current state.

    stale, field_only, cacheblend, erratum, field_and_erratum, hoist_to_end, full_downstream   as in `kvprobe.edit`

Effects, by arm: `X.none.correct_rate`, `X.first...`, `X.second...`, `X.both...`; over all of them `X.changed...`
(decisions that the new state turns), `X.unchanged...` (decisions that it leaves), `X.agreement` with a full prefill,
`X.margin_error` (largest difference from it, in logits) and `X.token_share` of an edit in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import pandas as pd

from kvprobe.edit.context import EditableContext
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.field_states import (
    FIELDS,
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

ARMS = ("stale", "field_only", "cacheblend", "erratum", "field_and_erratum", "hoist_to_end", "full_downstream")
FLIPS: Mapping[str, tuple[str, ...]] = {"none": (), "first": FIELDS[:1], "second": FIELDS[1:], "both": FIELDS}
"""Which fields are changed, in this order."""
_PAPER_FLIPS = {"none": "flip_none", "first": "flip_role", "second": "flip_status", "both": "flip_both"}


@PROBES.register("multi_field")
class MultiField(Probe):
    """Edits of two fields in one context, by every method."""

    name: ClassVar[str] = "multi_field"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"erratum.{ours}.correct_rate": PaperEntry("multi_field_edit", f"{theirs}/erratum", "P_correct")
        for ours, theirs in _PAPER_FLIPS.items()
    }

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each arm, flip and question.

        Raises:
            ConfigError: a pair is not one of task two_fields.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            case = two_field_case(subject, pair)
            for arm in ARMS:
                rows += [{"pair": index, **case.common, "arm": arm, **row} for row in _arm_rows(case, arm)]
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Right decisions by arm and flip, against the full prefill, and the constant baselines."""
        effects: list[Effect] = []
        for arm, part in rows.groupby("arm", sort=False):
            effects += state_effects(str(arm), part, statistics)
            for flip, some in part.groupby("flip", sort=False):
                effects += state_effects(f"{arm}.{flip}", some, statistics)
            for label, some in _by_change(part):
                effects += state_effects(f"{arm}.{label}", some, statistics)
            effects += against_prefill(str(arm), part, statistics)
        keys = ("pair", "flip", "question")
        changed = rows[rows["changed"]]
        effects.append(
            arms_difference("field_alone.changed.difference", changed, ("field_only", "stale"), keys, statistics)
        )
        return [*effects, *shared_effects(rows[rows["arm"] == ARMS[-1]], statistics)]

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Right decisions by arm, for those that must turn and those that must stay; one column for each model."""
        from kvprobe.probes.editing.multi_field.figure import draw_multi_field

        return draw_multi_field(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Right decisions among those that must turn, all models."""
        from kvprobe.probes.editing.multi_field.figure import multi_field_panel

        multi_field_panel(axes, panels)


def _arm_rows(case: TwoFieldCase, arm: str) -> Iterator[Measurement]:
    """Every flip by one method; `both` goes on from `first`."""
    first = case.context.copy()
    made: dict[tuple[str, ...], tuple[EditableContext, list[float]]] = {(): (first, [])}
    for flip, fields in FLIPS.items():
        if fields not in made:
            earlier, shares = made[fields[:-1]]
            context = earlier.copy()
            cost = context.set(fields[-1], case.values[fields[-1]][1], arm)
            made[fields] = context, [*shares, cost.fraction]
        context, shares = made[fields]
        share = sum(shares) / len(shares) if shares else None
        for question in case.questions:
            yield {"flip": flip, "token_share": share, **case.row(context, question)}


def _by_change(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for label, changed in (("changed", True), ("unchanged", False)):
        some = rows[rows["changed"] == changed]
        if len(some):
            yield label, some
