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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from kvprobe.composing.chunk import Header
from kvprobe.edit.meter import Meter
from kvprobe.engine.agreement import agreement
from kvprobe.engine.readout import read
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.edit_arms import Arm, make_arm, same_value
from kvprobe.probes.kit.edit_cases import EditCase, edit_case, reading_row, worded_edit
from kvprobe.probes.system.keystone.skill_edits import RecompiledSkill, SkillLayout, composed_case
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.skill_decision import AHEAD

if TYPE_CHECKING:
    from torch import Tensor

    from kvprobe.models.subject import Subject

RECOMPUTED = "recomputed"
STALE, REFERENCE, RECOMPILE = "stale", "full_reprefill", RecompiledSkill.name


@PROBES.register("keystone")
class Keystone(Probe):
    """Whether an edit inside a skill that was compiled elsewhere does what it does in an ordinary cache."""

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
    def _returns_are_measured(self) -> Keystone:
        if len(set(self.headers)) < len(self.headers):
            raise ValueError("a header is named twice")
        if self.return_arms and self.return_header not in self.headers:
            raise ValueError(f"return_header {self.return_header!r} is none of the headers")
        known = {arm.name for arm in self.arms()} - {REFERENCE, RECOMPILE}
        unknown = [name for name in self.return_arms if name not in known]
        if unknown:
            raise ValueError(f"return_arms names {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return self

    def arms(self) -> list[Arm]:
        """All arms; `recompile` is made anew for each prompt, and the reference is run in `recomputed` alone."""
        chosen = {"selective_{size}": "decision_attention", "deviation_{size}": "first_layer_deviation"}
        percent = {"percent": round(100 * self.share)}
        return [
            *(make_arm(name, name) for name in (STALE, "field_only")),
            *(
                make_arm(condition, "selective", {"size": k}, k=k, criterion=criterion)
                for condition, criterion in chosen.items()
                for k in self.sizes
            ),
            make_arm("cacheblend_{percent}", "cacheblend", percent, share=self.share),
            *(make_arm(name, name) for name in ("erratum", "field_and_erratum", "full_downstream", REFERENCE)),
            Arm(RECOMPILE, RecompiledSkill(self.skill)),
        ]

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
        arms = {arm.name: arm for arm in self.arms()}
        row, target = _run(subject, case, arms[REFERENCE])
        yield {"regime": RECOMPUTED, **row, **_against(target, target)}
        others = [arm for name, arm in arms.items() if name not in {REFERENCE, RECOMPILE}]
        for header in self.headers:
            composed = composed_case(subject, case, SkillLayout(self.skill, header, self.seam))
            if header == self.headers[0]:
                in_place = RecompiledSkill(self.skill, case.stale.token_ids[: composed.skill.start])
                yield from _regime_rows(subject, case, [*others, Arm(RECOMPILE, in_place)], target, RECOMPUTED)
            regime = f"composed_{header}"
            recompile = Arm(RECOMPILE, RecompiledSkill(self.skill, composed.head, self.seam))
            ran = composed.receipt.tokens_appended + composed.receipt.tokens_recomputed
            facts = {"moved": composed.moved, "compose_tokens": ran}
            for row in _regime_rows(subject, composed.case, [*others, recompile], target, regime):
                yield {**row, **facts}
            if header == self.return_header:
                chosen = [arms[name] for name in arms if name in self.return_arms]
                for row in _return_rows(subject, composed.case, chosen, self.return_trips):
                    yield {"regime": regime, **row}


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
