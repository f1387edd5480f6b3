"""Controls of the erratum (protocol 5.4, critique ED8): is it what the line says that turns the decision?

Every arm is an edit of the stale cache, which holds the old value and what was concluded from it. A line before the
task, with the task run behind it:

    stale                no line
    new_value            the erratum
    old_value            the erratum with the old value
    neutral              as many tokens about nothing
    random               the same tokens in random order
    irrelevant_field     the erratum of a field that the prompt does not mention (overcorrection in the paper)
    unmentioned_value    the erratum with a value that no case of the rule names (overcorrection)
    old_then_new         two errata, the old value's first
    new_then_old         and the other way round
    irrelevant_then_new  the irrelevant field's erratum first

The erratum right behind the session block instead, with what follows

    early_reused         kept, its keys rotated to their new places
    early_recomputed     run anew

The rule names two values, so `unmentioned_value` has no right answer: it tells how much of the effect is the presence
of some erratum of the field.

Effects: `neutral.new_rate`, `neutral.margin_shift` (against the stale cache, logits),
`value.against_neutral.difference` within pairs, and `as_expected`, the share of all decisions that are what the line
ought to lead to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvprobe.edit.base import Edited, make_method
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.edit_cases import EditCase, measure_cases, reading_row
from kvprobe.probes.kit.pair_lines import piece_of, subjects_of
from kvprobe.tasks.erratum_lines import about_irrelevant_field, about_unmentioned_value, random_line_tokens
from kvprobe.tasks.extra_lines import line_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

EXPECTED: Mapping[str, bool | None] = {
    "stale": False,
    "neutral": False,
    "random": False,
    "old_value": False,
    "irrelevant_field": False,
    "unmentioned_value": None,
    "new_then_old": False,
    "old_then_new": True,
    "irrelevant_then_new": True,
    "early_reused": True,
    "early_recomputed": True,
    "new_value": True,
}
"""Whether the line of each arm ought to lead to the new value's decision; `None`: nothing says so."""
EARLY: Mapping[str, str] = {"early_reused": "field_only", "early_recomputed": "full_downstream"}
"""The method that makes an early line: what follows is kept, or run anew."""


@PROBES.register("erratum_controls")
class ErratumControls(Probe):
    """What the content, the place and the order of errata do to a stale decision."""

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each arm.

        Raises:
            ConfigError: a pair does not say its entity, field and values, or has no session block before its rule.
        """
        return measure_cases(subject, pairs, progress, lambda case, index: _rows(subject, case, index))


def _rows(subject: Subject, case: EditCase, index: int) -> Iterator[Measurement]:
    for arm, edited in arms_of(subject, case, index):
        reading, expected = reading_row(case.read(subject, edited)), EXPECTED[arm]
        as_expected = None if expected is None else reading["correct"] == expected
        yield {"arm": arm, "as_expected": as_expected, "tokens": edited.receipt.tokens_appended, **reading}


def arms_of(subject: Subject, case: EditCase, index: int) -> Iterator[tuple[str, Edited]]:
    """The edited prompt of every arm; `index` chooses among the neutral lines and the irrelevant fields."""
    lines = _lines(subject, case.pair, index)
    yield "stale", make_method("stale").apply(subject, case.stale, case.edit)
    for arm, line in lines.items():
        edit = replace(case.edit, erratum_ids=tuple(line))
        yield arm, make_method("erratum").apply(subject, case.stale, edit)
    # A line behind a segment is that segment edited to itself and the line.
    segment, ids = piece_of(case.pair, "session_rest")
    early = replace(case.edit, field=segment, new_ids=(*ids, *lines["new_value"]))
    for arm, method in EARLY.items():
        yield arm, make_method(method).apply(subject, case.stale, early)


def _lines(subject: Subject, pair: Pair, index: int) -> dict[str, list[int]]:
    tokenizer, said = subject.tokenizer, subjects_of(pair)
    new, old = (line_tokens(name, said, tokenizer) for name in ("override", "old_value"))
    elsewhere = line_tokens("override", about_irrelevant_field(said, pair.base.text, start=index), tokenizer)
    unmentioned = about_unmentioned_value(said, pair.scenario.skeleton)
    return {
        "neutral": line_tokens("neutral", said, tokenizer, start=index),
        "random": random_line_tokens(said, tokenizer, start=index),
        "old_value": old,
        "irrelevant_field": elsewhere,
        "unmentioned_value": line_tokens("override", unmentioned, tokenizer),
        "new_then_old": [*new, *old],
        "old_then_new": [*old, *new],
        "irrelevant_then_new": [*elsewhere, *new],
        "new_value": new,
    }
