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
from typing import TYPE_CHECKING, ClassVar

import pandas as pd

from kvprobe.edit.base import EDIT_METHODS
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.edit_cases import baseline_columns, baseline_effects, edit_case, reading_row
from kvprobe.probes.kit.measures import pair_noise
from kvprobe.probes.kit.pair_lines import subjects_of
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, mean, proportion
from kvprobe.tasks.erratum_lines import PHRASINGS, phrasing_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

METHODS = ("erratum", "field_and_erratum")
WITHOUT_LINE: Mapping[str, str] = {"erratum": "stale", "field_and_erratum": "field_only"}
"""The edit that each method is without its line."""
NO_LINE = "none"
_PAPER_LINES = {
    "override": "override_full",
    "restatement": "bare_value",
    "minimal": "minimal",
    "question": "question",
}


@PROBES.register("erratum_phrasing")
class ErratumPhrasing(Probe):
    """Which phrasings of an erratum turn the decision, and for how many tokens."""

    name: ClassVar[str] = "erratum_phrasing"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"erratum.{ours}.new_rate": PaperEntry("erratum_phrasing", theirs, "P_correct")
        for ours, theirs in _PAPER_LINES.items()
    }

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each method and phrasing, no line included.

        Raises:
            ConfigError: a pair does not say its entity, field and values.
        """
        rows: list[Measurement] = []
        baselines = baseline_columns(pairs, subject.tokenizer)
        for index, pair in enumerate(pairs):
            common = {"pair": index, **baselines[index]}
            rows += [{**common, **row} for row in _rows(subject, pair)]
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Share of decisions for the new value and cost of every cell, what the field in place adds, baselines."""
        effects = [
            effect for _, part in rows.groupby(["method", "line"], sort=False) for effect in _cell(part, statistics)
        ]
        new = rows.assign(new=rows["correct"].astype(float)).pivot(
            index="pair", columns=["method", "line"], values="new"
        )
        clusters = rows.groupby("pair")[statistics.cluster].first().loc[new.index]
        for line in (NO_LINE, *PHRASINGS):
            difference = new["field_and_erratum", line] - new["erratum", line]
            name = f"in_place.{line}.difference"
            floor = 1 / len(difference)
            effects.append(mean(name, difference, clusters=clusters, statistics=statistics, noise_floor=floor))
        noise = pair_noise(rows, statistics)
        return [*effects, *baseline_effects(rows, statistics), noise]

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Share of decisions for the new value by phrasing and method; a column for each model."""
        from kvprobe.probes.editing.erratum_phrasing.figure import draw_erratum_phrasing

        return draw_erratum_phrasing(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """The same for the erratum alone, against its cost, all models."""
        from kvprobe.probes.editing.erratum_phrasing.figure import erratum_phrasing_panel

        erratum_phrasing_panel(axes, panels)


def _rows(subject: Subject, pair: Pair) -> Iterator[Measurement]:
    case, said = edit_case(subject, pair), subjects_of(pair)
    for method in METHODS:
        for line in (NO_LINE, *PHRASINGS):
            ids = () if line == NO_LINE else tuple(phrasing_tokens(line, said, subject.tokenizer))
            edit = replace(case.edit, erratum_ids=ids)
            name = WITHOUT_LINE[method] if line == NO_LINE else method
            edited = EDIT_METHODS.get(name)().apply(subject, case.stale, edit)
            tokens = edited.receipt.tokens_appended + edited.receipt.tokens_recomputed
            yield {
                **case.common(),
                "method": method,
                "line": line,
                "line_tokens": len(ids),
                "tokens": tokens,
                "cost": tokens / len(edited.prompt.token_ids),
                **reading_row(case.read(subject, edited)),
            }


def _cell(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    name, clusters = f"{rows['method'].iloc[0]}.{rows['line'].iloc[0]}", rows[statistics.cluster]
    yield proportion(f"{name}.new_rate", rows["correct"].astype(float), clusters=clusters, statistics=statistics)
    yield mean(f"{name}.tokens", rows["tokens"], clusters=clusters, statistics=statistics, unit="tokens")
    yield mean(f"{name}.cost", rows["cost"], clusters=clusters, statistics=statistics)
