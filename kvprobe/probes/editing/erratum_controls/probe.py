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
from typing import TYPE_CHECKING, ClassVar

import pandas as pd

from kvprobe.edit.base import EDIT_METHODS, Edited
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.edit_cases import EditCase, baseline_columns, baseline_effects, edit_case, reading_row
from kvprobe.probes.kit.measures import pair_noise
from kvprobe.probes.kit.pair_lines import piece_of, subjects_of
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, mean, proportion
from kvprobe.tasks.erratum_lines import about_irrelevant_field, about_unmentioned_value, random_line_tokens
from kvprobe.tasks.extra_lines import line_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_AGAINST = ("neutral", "random", "old_value", "irrelevant_field", "unmentioned_value", "early_reused")


@PROBES.register("erratum_controls")
class ErratumControls(Probe):
    """What the content, the place and the order of errata do to a stale decision."""

    name: ClassVar[str] = "erratum_controls"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        "stale.new_rate": PaperEntry("erratum_content_control", "stale", "P_correct"),
        "new_value.new_rate": PaperEntry("erratum_content_control", "err_correct", "P_correct"),
        "old_value.new_rate": PaperEntry("erratum_content_control", "err_wrong", "P_correct"),
        "neutral.new_rate": PaperEntry("erratum_content_control", "err_irrelevant", "P_correct"),
        "irrelevant_field.new_rate": PaperEntry("erratum_overcorrection", "irrelevant_field_erratum", "decision_flips"),
        "irrelevant_then_new.new_rate": PaperEntry("erratum_stacked", "irrelevant_then_relevant", "P_correct"),
    }

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each arm.

        Raises:
            ConfigError: a pair does not say its entity, field and values, or has no session block before its rule.
        """
        rows: list[Measurement] = []
        baselines = baseline_columns(pairs, subject.tokenizer)
        for index, pair in enumerate(pairs):
            case = edit_case(subject, pair)
            for arm, edited in _arms(subject, case, index):
                reading = reading_row(case.read(subject, edited))
                expected = EXPECTED[arm]
                rows.append(
                    {
                        "pair": index,
                        **case.common(),
                        **baselines[index],
                        "arm": arm,
                        "as_expected": None if expected is None else reading["correct"] == expected,
                        "tokens": edited.receipt.tokens_appended,
                        **reading,
                    }
                )
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Share of decisions for the new value, and shift of the margin, by arm; differences; baselines."""
        effects = [effect for _, part in rows.groupby("arm", sort=False) for effect in _arm_effects(part, statistics)]
        new = rows.assign(new=rows["correct"].astype(float)).pivot(index="pair", columns="arm", values="new")
        clusters = rows.groupby("pair")[statistics.cluster].first().loc[new.index]
        for arm in _AGAINST:
            difference, floor = new["new_value"] - new[arm], 1 / len(new)
            name = f"value.against_{arm}.difference"
            effects.append(mean(name, difference, clusters=clusters, statistics=statistics, noise_floor=floor))
        judged = rows[rows["as_expected"].notna()]
        right, labels = judged["as_expected"].astype(float), judged[statistics.cluster]
        effects.append(proportion("as_expected", right, clusters=labels, statistics=statistics))
        noise = pair_noise(rows, statistics)
        return [*effects, *baseline_effects(rows, statistics), noise]

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Share of decisions for the new value by arm, beside what the line ought to lead to; a column each model."""
        from kvprobe.probes.editing.erratum_controls.figure import draw_erratum_controls

        return draw_erratum_controls(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """The same, all models in one."""
        from kvprobe.probes.editing.erratum_controls.figure import erratum_controls_panel

        erratum_controls_panel(axes, panels)


def _arms(subject: Subject, case: EditCase, index: int) -> Iterator[tuple[str, Edited]]:
    lines = _lines(subject, case.pair, index)
    yield "stale", EDIT_METHODS.get("stale")().apply(subject, case.stale, case.edit)
    for arm, line in lines.items():
        edit = replace(case.edit, erratum_ids=tuple(line))
        yield arm, EDIT_METHODS.get("erratum")().apply(subject, case.stale, edit)
    # A line behind a segment is that segment edited to itself and the line.
    segment, ids = piece_of(case.pair, "session_rest")
    early = replace(case.edit, field=segment, new_ids=(*ids, *lines["new_value"]))
    for arm, method in EARLY.items():
        yield arm, EDIT_METHODS.get(method)().apply(subject, case.stale, early)


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


def _arm_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    arm, clusters = rows["arm"].iloc[0], rows[statistics.cluster]
    yield proportion(f"{arm}.new_rate", rows["correct"].astype(float), clusters=clusters, statistics=statistics)
    yield mean(
        f"{arm}.margin_shift",
        rows["margin"] - rows["m_base"],
        clusters=clusters,
        statistics=statistics,
        unit="logits",
        noise_floor=float(rows["noise_floor"].max()),
    )
