"""Phrasing of an erratum as a real edit: what the line says, with and without the field in place, and what it costs.

The probe `wording` asks what a line does to a context; here every cell is an edit of the stale cache by a method of
`kvprobe.edit`, so that its cost is counted with it (protocol 5.4). Each of the phrasings of
`kvprobe.tasks.erratum_lines` is appended

    erratum             to the stale cache
    field_and_erratum   to the stale cache with the field edited in place

beside `stale` and `field_only`, which have no line.

Effects: `erratum.override.new_rate`, its cost `erratum.override.tokens` and `.cost` (share of the prompt), and
`in_place.override.difference`, what the field in place adds to the line, within pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvprobe.edit.base import make_method
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.edit_cases import EditCase, measure_cases, reading_row
from kvprobe.probes.kit.pair_lines import subjects_of
from kvprobe.tasks.erratum_lines import PHRASINGS, phrasing_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

METHODS = ("erratum", "field_and_erratum")
WITHOUT_LINE: Mapping[str, str] = {"erratum": "stale", "field_and_erratum": "field_only"}
"""The edit that each method is without its line."""
NO_LINE = "none"
LINES = (NO_LINE, *PHRASINGS)


@PROBES.register("erratum_phrasing")
class ErratumPhrasing(Probe):
    """Which phrasings of an erratum turn the decision, and for how many tokens."""

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each method and phrasing, no line included.

        Raises:
            ConfigError: a pair does not say its entity, field and values.
        """
        return measure_cases(subject, pairs, progress, lambda case, _: _rows(subject, case))


def _rows(subject: Subject, case: EditCase) -> Iterator[Measurement]:
    said = subjects_of(case.pair)
    for method in METHODS:
        for line in LINES:
            ids = () if line == NO_LINE else tuple(phrasing_tokens(line, said, subject.tokenizer))
            edit = replace(case.edit, erratum_ids=ids)
            name = WITHOUT_LINE[method] if line == NO_LINE else method
            edited = make_method(name).apply(subject, case.stale, edit)
            tokens = edited.receipt.tokens_appended + edited.receipt.tokens_recomputed
            yield {
                "method": method,
                "line": line,
                "line_tokens": len(ids),
                "tokens": tokens,
                "cost": tokens / len(edited.prompt.token_ids),
                **reading_row(case.read(subject, edited)),
            }
