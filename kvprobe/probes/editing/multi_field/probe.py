"""Two fields edited in one context (protocol 5.5): does each edit turn what it must and leave the rest?

Starting from the base prompt of a pair of task two_fields, each method changes nothing, the first field, the second,
or both (one after the other), and every question is asked after it. The right answer is that of the current state.

    stale, field_only, cacheblend, erratum, field_and_erratum, hoist_to_end, full_downstream   as in `kvprobe.edit`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvprobe.edit.context import EditableContext
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.field_states import FIELDS, TwoFieldCase, two_field_case
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

ARMS = ("stale", "field_only", "cacheblend", "erratum", "field_and_erratum", "hoist_to_end", "full_downstream")
FLIPS: Mapping[str, tuple[str, ...]] = {"none": (), "first": FIELDS[:1], "second": FIELDS[1:], "both": FIELDS}
"""Which fields are changed, in this order."""


@PROBES.register("multi_field")
class MultiField(Probe):
    """Edits of two fields in one context, by every method."""

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


def _arm_rows(case: TwoFieldCase, arm: str) -> Iterator[Measurement]:
    """Every flip by one method; `both` goes on from `first`."""
    made: dict[tuple[str, ...], tuple[EditableContext, list[float]]] = {(): (case.context.copy(), [])}
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
