"""Edit inside a composed skill (protocol 7, critique KS1, G3, G5, ED1, ED2, CO1).

A skill holds a line of state, the field, and the rule that reads it. Its keys and values were computed apart from the
prompt, with the old value, and were moved into it; then the field changes. Every arm edits the same pairs in regimes:

    recomputed      the old prompt by an ordinary prefill
    composed_H      prefix run, skill compiled behind header H moved behind it, task run (H: none, neutral, real, bos)

All regimes have one target, the full prefill of the new prompt, and one denominator, m(new) - m(old) of the two full
prefills. What a composed prompt decides before any edit is the arm `stale` of its regime.

    stale, field_only, selective_K, deviation_K, cacheblend_P, erratum, field_and_erratum, full_downstream
                     as in `kvprobe.edit`; selective_K chooses by decision attention, deviation_K as CacheBlend does
    recompile        the skill compiled anew with the new value, moved, and all after it run; in `recomputed` it is
                     compiled where it stands
    full_reprefill   the target itself; it keeps nothing of a cache, so it is run in `recomputed` alone

Effects, with R a regime and X an arm:

    R.X.correct_rate, R.X.recovery, R.X.token_share, R.X.kl (to the target, nats), R.X.agreement (most likely token)
    R.X.difference   recovery of a composed regime less that of `recomputed`, on the same pairs; beside it the two
                     one-sided tests that its mean lies within `equivalence_margin` gaps of 0
    R.every_arm.equivalence_p   the largest of those p values over all edits: together they are one
                     intersection-union test, which needs no adjustment; `stale` is no edit and not in it
    R.every_arm.error   the largest difference of two margins, in logits
    R.fixed_edits.equivalence_p, .error   the same of the edits that do not choose tokens by what is in the cache
    R.X.own_recovery    the paper's denominator: from the composed stale prompt to the recompiled skill (critique KS1)
    R.ahead_N.disagreement   mean absolute difference over all edits, in gaps, with N notes ahead of the skill
    R.moved, R.compose.token_share   how far the skill was moved, and what composing ran, compiling left out
    R.X.return_T.correct_rate   under the old value after T edits there and back
    R.X.return.residue  what T edits there and back leave, against one edit to the value that stands there, in gaps
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import pandas as pd
from pydantic import Field, model_validator

from kvprobe.composing.chunk import Header
from kvprobe.edit.meter import Meter
from kvprobe.engine.agreement import agreement
from kvprobe.engine.readout import read
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.edit_arms import Arm, make_arm, same_value
from kvprobe.probes.kit.edit_cases import EditCase, edit_case, reading_row, worded_edit
from kvprobe.probes.legacy import Probe
from kvprobe.probes.system.keystone.effects import (
    RECOMPUTED,
    REFERENCE,
    arm_summaries,
    comparisons,
    composing,
    returning,
)
from kvprobe.probes.system.keystone.skill_edits import RecompiledSkill, SkillLayout, composed_case
from kvprobe.stats import Effect, StatisticsConfig, maximum
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.skill_decision import AHEAD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from kvprobe.models.subject import Subject

_PAPER_ARMS = {"field_only": "in_place", "selective_8": "sel@8", "selective_32": "sel@32", "erratum": "erratum"}
_RECOMPILE = RecompiledSkill.name


@PROBES.register("keystone")
class Keystone(Probe):
    """Whether an edit inside a skill that was compiled elsewhere does what it does in an ordinary cache."""

    name: ClassVar[str] = "keystone"
    # The paper compiles in isolation and divides each regime by its own denominators (critique KS1).
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{ours}.{arm}.recovery": PaperEntry("edit_inside_transplant", f"{name}/{theirs}", "decision_recovery")
        for ours, theirs in ((RECOMPUTED, "recomputed"), ("composed_none", "composed"))
        for arm, name in _PAPER_ARMS.items()
    }
    may_lack: ClassVar[Mapping[str, str]] = {
        "*.equivalence_p": "An equivalence test needs two skeletons.",
        "*.own_recovery": "The composed decisions do not move, so the paper's denominator is 0.",
    }

    class Parameters(base.Parameters):
        """The skill, the arms and what counts as no difference."""

        skill: tuple[str, ...] = Field(
            ("session", "field", "session_rest", "filler_before", "policy", "filler"),
            min_length=1,
            description="segments that make up the skill, where a prompt has them",
        )
        headers: tuple[Header, ...] = Field(
            ("none", "neutral", "real"), min_length=1, description="what the skill is compiled behind"
        )
        seam: int = Field(0, ge=0, description="first tokens of the skill that are run where they stand")
        sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
            (8, 32), min_length=1, description="tokens that the selective arms recompute"
        )
        share: float = Field(0.15, gt=0, le=1, description="of the tokens that the CacheBlend-style arm recomputes")
        equivalence_margin: float = Field(0.1, gt=0, description="largest mean difference that is none, in gaps")
        return_arms: tuple[str, ...] = Field(
            ("selective_32", "field_and_erratum"), description="arms that edit there and back"
        )
        return_header: Header = Field("neutral", description="in the skill compiled behind this")
        return_trips: int = Field(2, ge=1, description="times there and back")

        @model_validator(mode="after")
        def _returns_are_measured(self) -> Keystone.Parameters:
            if len(set(self.headers)) < len(self.headers):
                raise ValueError("a header is named twice")
            if self.return_arms and self.return_header not in self.headers:
                raise ValueError(f"return_header {self.return_header!r} is none of the headers")
            known = {arm.name for arm in _arms(self.sizes, self.share)} - {REFERENCE}
            unknown = [name for name in self.return_arms if name not in known]
            if unknown:
                raise ValueError(f"return_arms names {unknown[0]!r}; known are {', '.join(sorted(known))}")
            return self

    def arms(self) -> list[Arm]:
        """The registered arms; `recompile` is made for each prompt."""
        return _arms(self.parameters.sizes, self.parameters.share)

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair and regime one row for each arm, and in one regime for each arm's way there and back.

        Raises:
            ConfigError: a pair does not say its entity, field and values, or its field is not in the skill.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            case = edit_case(subject, pair)
            shared = {"pair": index, **case.common(), "notes_ahead": int(pair.scenario.attributes.get(AHEAD, 0))}
            rows += [{**shared, **row} for row in self._pair_rows(subject, case)]
            progress(index + 1, len(pairs))
        return rows

    def _pair_rows(self, subject: Subject, case: EditCase) -> Iterator[Measurement]:
        own, arms = self.parameters, self.arms()
        reference = next(arm for arm in arms if arm.name == REFERENCE)
        row, target = _run(subject, case, reference)
        yield {"regime": RECOMPUTED, **row, **_against(target, target)}
        others = [arm for arm in arms if arm is not reference]
        for header in own.headers:
            composed = composed_case(subject, case, SkillLayout(own.skill, header, own.seam))
            if header == own.headers[0]:
                in_place = RecompiledSkill(own.skill, case.stale.token_ids[: composed.skill.start])
                yield from _regime_rows(subject, case, [*others, Arm(_RECOMPILE, in_place)], target, RECOMPUTED)
            regime = f"composed_{header}"
            recompile = Arm(_RECOMPILE, RecompiledSkill(own.skill, composed.head, own.seam))
            ran = composed.receipt.tokens_appended + composed.receipt.tokens_recomputed
            facts = {"moved": composed.moved, "compose_tokens": ran}
            for row in _regime_rows(subject, composed.case, [*others, recompile], target, regime):
                yield {**row, **facts}
            if header == own.return_header:
                chosen = [arm for arm in others if arm.name in own.return_arms]
                for row in _return_rows(subject, composed.case, chosen, own.return_trips):
                    yield {"regime": regime, **row}

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Every arm in every regime, the composed regimes against `recomputed`, the ways back, and the noise."""
        edits, back = rows[rows["edit"] == "new"], rows[rows["edit"] != "new"]
        effects = list(arm_summaries(edits, statistics))
        effects += comparisons(edits, self.parameters.equivalence_margin, statistics)
        effects += composing(edits, statistics)
        effects += returning(back, statistics)
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Composed against recomputed recovery, and correctness against cost; one column for each header."""
        from kvprobe.probes.system.keystone.figure import draw_keystone

        return draw_keystone(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Composed against recomputed recovery behind a neutral header, all models."""
        from kvprobe.probes.system.keystone.figure import keystone_panel

        keystone_panel(axes, panels)


def _arms(sizes: Sequence[int], share: float) -> list[Arm]:
    return [
        *(make_arm(name, name) for name in ("stale", "field_only")),
        *(make_arm(f"selective_{k}", "selective", k=k, criterion="decision_attention") for k in sizes),
        *(make_arm(f"deviation_{k}", "selective", k=k, criterion="first_layer_deviation") for k in sizes),
        make_arm(f"cacheblend_{round(100 * share)}", "cacheblend", share=share),
        *(make_arm(name, name) for name in ("erratum", "field_and_erratum", "full_downstream", REFERENCE)),
    ]


def _run(subject: Subject, case: EditCase, arm: Arm) -> tuple[Measurement, Tensor]:
    """One arm on one case: its row, and logits `[vocab]` of its decision.

    `tokens` are counted on the model's layers, without the decision token, which every arm runs once.
    """
    with Meter(subject) as meter:
        edited = arm.method.apply(subject, case.stale, case.edit)
    logits = edited.prompt.decide(subject).logits
    reading = read(logits, case.pair.base_answer_id, case.pair.donor_answer_id)
    row = {"arm": arm.name, "edit": "new", **reading_row(reading)}
    return {**row, "tokens": meter.tokens, "flops": edited.receipt.flops}, logits


def _against(logits: Tensor, target: Tensor) -> Measurement:
    found = agreement(logits, target)
    return {"kl": found.kl, "same_argmax": found.same_argmax}


def _regime_rows(
    subject: Subject, case: EditCase, arms: Sequence[Arm], target: Tensor, regime: str
) -> Iterator[Measurement]:
    for arm in arms:
        row, logits = _run(subject, case, arm)
        yield {"regime": regime, **row, **_against(logits, target)}


def _return_rows(subject: Subject, case: EditCase, arms: Sequence[Arm], trips: int) -> Iterator[Measurement]:
    """Each arm's margin after one edit to the value that stands there, and after each way there and back."""
    home = _edit_to_old_value(subject, case)
    for arm in arms:
        once = arm.method.apply(subject, case.stale, home.edit)
        yield {"arm": arm.name, "edit": "once", "trip": 0, **reading_row(case.read(subject, once))}
        prompt = case.stale
        for trip in range(1, trips + 1):
            there = arm.method.apply(subject, prompt, case.edit)
            back = arm.method.apply(subject, there.prompt, home.edit)
            prompt = back.prompt
            yield {"arm": arm.name, "edit": "return", "trip": trip, **reading_row(case.read(subject, back))}


def _edit_to_old_value(subject: Subject, case: EditCase) -> EditCase:
    """The case as an edit to the old value, whose erratum says that value."""
    said, back = case.pair.scenario, same_value(case)
    about = said.attributes["entity"], said.attributes["field"], said.attributes["old"]
    return replace(back, edit=worded_edit(back.edit.field, back.edit.new_ids, said.wording, about, subject.tokenizer))
