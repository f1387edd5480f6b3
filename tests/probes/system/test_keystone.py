"""Laws of the keystone: in its own place a skill is the prefill, edits touch what they say, numbers are Hugging Face's."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers.cache_utils import DynamicCache
from worded_models import TOKENIZER, aligned, margin_behind, margin_of, plain_logits, worded
from worded_models import effects_of as read_by
from worded_models import measured as measured_by

from kvprobe.composing.chunk import Header
from kvprobe.edit.meter import Meter
from kvprobe.errors import ConfigError
from kvprobe.models.loader import load_subject
from kvprobe.models.subject import Subject
from kvprobe.probes.kit.edit_arms import Arm
from kvprobe.probes.kit.edit_cases import edit_case, worded_edit
from kvprobe.probes.system.keystone.probe import Keystone
from kvprobe.probes.system.keystone.reading import READING
from kvprobe.probes.system.keystone.skill_edits import (
    ComposedCase,
    RecompiledSkill,
    SkillLayout,
    composed_case,
    skill_span,
)
from kvprobe.report.reference import paper_model, paper_values
from kvprobe.runs import load_config
from kvprobe.stats import Effect
from kvprobe.tasks.context import Span
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, align
from kvprobe.tasks.skill_decision import SkillDecision

SKILL = Keystone().skill
EXACT = 1e-9
# Some architectures take norms in float32, whatever their dtype, and so see in how many pieces a prompt is run.
CLOSE = 5e-6
# Keys are rotated in float32, whatever the model's dtype.
ROTATED = 1e-4


def pairs_of(size: int, ahead: int = 2, **parameters: Any) -> list[Pair]:
    return aligned(SkillDecision(size=size, notes_ahead=(ahead,), **parameters))


def probe_of(**parameters: Any) -> Keystone:
    small: dict[str, Any] = {"sizes": (3,), "share": 0.2, "return_arms": ()}
    return Keystone(**{**small, **parameters})


def measured(subject: Subject, pairs: list[Pair], probe: Keystone) -> pd.DataFrame:
    return measured_by(probe, subject, pairs)


def margins(rows: pd.DataFrame, regime: str) -> pd.Series:
    return rows[(rows["regime"] == regime) & (rows["edit"] == "new")].set_index("arm")["margin"]


@cache
def composed(family: str, header: Header, ahead: int = 2) -> ComposedCase:
    (pair,) = pairs_of(1, ahead)
    return composed_case(worded(family), edit_case(worded(family), pair), SkillLayout(SKILL, header))


def all_arms(found: ComposedCase) -> list[Arm]:
    others = [arm for arm in probe_of().arms() if arm.name != "recompile"]
    return [*others, Arm("recompile", RecompiledSkill(SKILL, found.head))]


@pytest.mark.parametrize(("family", "ahead"), [("qwen3", 0), ("llama", 3), ("gemma2", 0), ("mistral", 3)])
def test_a_skill_compiled_in_its_place_is_edited_as_in_an_ordinary_cache(family: str, ahead: int) -> None:
    rows = measured(worded(family), pairs_of(1, ahead), probe_of(headers=("real",)))
    ours, theirs = margins(rows, "recomputed"), margins(rows, "composed_real")
    assert sorted(ours.index) == sorted([*theirs.index, "full_reprefill"])
    assert sorted(ours.index) == sorted(arm.name for arm in probe_of().arms())
    assert (theirs - ours[theirs.index]).abs().max() < CLOSE
    assert rows["moved"].dropna().eq(0).all()
    assert abs(ours["full_reprefill"] - rows["m_donor"][0]) < CLOSE
    for exact in ("full_downstream", "recompile"):
        assert abs(theirs[exact] - rows["m_donor"][0]) < CLOSE
    kl = rows.set_index(["regime", "arm"])["kl"]
    assert kl["composed_real", "recompile"] < EXACT
    # A window of 7 tokens keeps the field out of the decision's sight.
    assert family == "mistral" or kl["composed_real", "stale"] > CLOSE


@pytest.mark.parametrize("header", ["none", "neutral", "real"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_entries_that_no_edit_computes_are_those_of_the_composed_cache(family: str, header: Header) -> None:
    subject, found = worded(family), composed(family, header)
    case = found.case
    assert (found.moved != 0) == (header != "real")
    print_before = case.stale.cache.fingerprint()
    for arm in all_arms(found):
        edited = arm.method.apply(subject, case.stale, case.edit)
        kept = [place for place in range(len(edited.prompt.cache)) if place not in edited.computed]
        assert bool(kept) == (arm.name != "full_reprefill"), arm.name
        for ours, theirs in zip(edited.prompt.cache.layers, case.stale.cache.layers, strict=True):
            assert torch.equal(ours.keys[:, :, kept], theirs.keys[:, :, kept]), arm.name
            assert torch.equal(ours.values[:, :, kept], theirs.values[:, :, kept]), arm.name
    assert case.stale.cache.fingerprint() == print_before


def plain_entries(model: Any, ids: tuple[int, ...], first: int, past: DynamicCache | None = None) -> DynamicCache:
    entries = DynamicCache() if past is None else past
    with torch.no_grad():
        places = torch.arange(first, first + len(ids))[None]
        model(torch.tensor([ids]), position_ids=places, past_key_values=entries, use_cache=True)
    return entries


def plain_composed(model: Any, pair: Pair, *, edited: bool) -> Tensor:
    """Logits of the composed prompt by Hugging Face alone: the skill is run at its place, seeing only itself."""
    ids, skill = pair.base.token_ids, skill_span(pair.base.spans, present(pair), "field")
    whole = plain_entries(model, ids[: skill.start], 0)
    alone = plain_entries(model, ids[skill.start : skill.end], skill.start)
    for number, layer in enumerate(alone.layers):
        whole.update(layer.keys, layer.values, number)
    plain_entries(model, ids[skill.end : -1], skill.end, whole)
    if edited:
        field = pair.field
        new = plain_entries(model, ids[: skill.start], 0)
        for number, layer in enumerate(alone.layers):
            reach = field.start - skill.start
            new.update(layer.keys[:, :, :reach], layer.values[:, :, :reach], number)
        plain_entries(model, pair.donor.token_ids[field.start : field.end], field.start, new)
        for ours, theirs in zip(whole.layers, new.layers, strict=True):
            ours.keys[:, :, field.start : field.end] = theirs.keys[:, :, field.start :]
            ours.values[:, :, field.start : field.end] = theirs.values[:, :, field.start :]
    with torch.no_grad():
        places = torch.tensor([[len(ids) - 1]])
        output = model(torch.tensor([ids[-1:]]), position_ids=places, past_key_values=whole, use_cache=True)
    return output.logits[0, -1].double()


def present(pair: Pair) -> tuple[str, ...]:
    return tuple(name for name in SKILL if name in pair.base.spans)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_margins_and_divergences_against_plain_hugging_face(family: str) -> None:
    subject, (pair,) = worded(family), pairs_of(1, 3)
    rows = measured(subject, [pair], probe_of(headers=("none",))).set_index(["regime", "arm"])
    target = torch.log_softmax(plain_logits(subject.model, pair.donor.token_ids), -1)
    for arm, edited in (("stale", False), ("field_only", True)):
        logits = plain_composed(subject.model, pair, edited=edited)
        ought = margin_of(pair, logits)
        row = rows.loc[("composed_none", arm)]
        assert row["margin"] == pytest.approx(ought, abs=ROTATED), arm
        kl = float((target.exp() * (target - torch.log_softmax(logits, -1))).sum())
        assert row["kl"] == pytest.approx(kl, abs=ROTATED)
        assert abs(ought - rows.loc[("recomputed", arm)]["margin"]) > 20 * ROTATED, arm
    assert rows["m_donor"].iloc[0] == pytest.approx(margin_of(pair, target), abs=EXACT)


@settings(max_examples=6, deadline=None)
@given(header=st.sampled_from(["none", "neutral", "real"]), seam=st.integers(0, 60))
def test_recompiling_runs_what_it_says_and_ends_in_the_composed_new_prompt(header: Header, seam: int) -> None:
    subject, (pair,) = worded("qwen3"), pairs_of(1)
    case, layout = edit_case(subject, pair), SkillLayout(SKILL, header, seam)
    found = composed_case(subject, case, layout)
    method = RecompiledSkill(SKILL, found.head, seam)
    with Meter(subject) as meter:
        edited = method.apply(subject, found.case.stale, case.edit)
    assert meter.tokens == method.tokens(found.case.stale, case.edit)
    assert meter.tokens == edited.receipt.tokens_appended
    other = composed_case(subject, edit_case(subject, pair.reversed()), layout).case.stale
    assert edited.prompt.token_ids == other.token_ids
    for ours, theirs in zip(edited.prompt.cache.layers, other.cache.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, atol=EXACT, rtol=0)


def test_there_and_back_leaves_one_edit_to_the_old_value() -> None:
    subject, (pair,) = worded("llama"), pairs_of(1)
    arms = ("field_only", "erratum", "field_and_erratum", "full_downstream")
    rows = measured(subject, [pair], probe_of(headers=("real",), return_header="real", return_arms=arms))
    back = rows[rows["edit"] != "new"]
    assert back.groupby("arm")["trip"].apply(list).to_dict() == {arm: [0, 1, 2] for arm in arms}
    assert back.groupby("arm")["margin"].agg(np.ptp).max() < EXACT
    spans, said = pair.base.spans, pair.scenario.attributes
    old = worded_edit("field", (1,), pair.scenario.wording, (said["entity"], said["field"], said["old"]), TOKENIZER)
    ids, task = pair.base.token_ids, spans["task"].start
    ought = margin_behind(subject, pair, [*ids[:task], *old.erratum_ids, *ids[task:]])
    found = back.groupby("arm")["margin"].last()
    assert found["erratum"] == pytest.approx(ought, abs=EXACT)
    assert found["full_downstream"] == pytest.approx(rows["m_base"][0], abs=EXACT)
    selective = measured(
        subject, [pair], probe_of(headers=("none",), return_header="none", return_arms=("selective_3",))
    )
    assert (selective["edit"] == "return").sum() == 2


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_models_whose_mechanism_is_known_are_told_apart_inside_a_skill(kind: str) -> None:
    """One writes notes by a head that rests on BOS where there is nothing to note, the other looks the field up."""
    subject = load_subject(f"micro-{kind}", device="cpu")
    pairs = [align(pair, subject.tokenizer) for pair in SkillDecision(size=1, wordings=("manual",)).prompt_pairs()]
    rows = measured(subject, pairs, probe_of(sizes=(32,), headers=("none", "neutral")))
    gap = rows["m_donor"] - rows["m_base"]
    recovery = ((rows["margin"] - rows["m_base"]) / gap).groupby([rows["regime"], rows["arm"]]).first()
    notes = kind == "note-taker"
    for regime in ("recomputed", "composed_neutral"):
        assert recovery[regime, "stale"] == pytest.approx(0, abs=0.01)
        assert recovery[regime, "field_only"] == pytest.approx(0 if notes else 1, abs=0.01)
        for exact in ("selective_32", "full_downstream", "recompile"):
            assert recovery[regime, exact] == pytest.approx(1, abs=0.01)
    # Behind nothing the first token of the skill is no BOS, so notes go wrong and half of the gap is lost (CO1).
    assert recovery["composed_none", "stale"] == pytest.approx(0.5 if notes else 0, abs=0.01)
    assert recovery["composed_none", "full_downstream"] == pytest.approx(1, abs=0.01)


def made_rows(apart: float, spread: float, pairs: int = 16) -> pd.DataFrame:
    """Every edit recovers 3 of a gap of 4, and `apart` gaps more in the composed prompt, give or take `spread`."""
    rows, arms = [], ("stale", "erratum", "recompile", "field_only")
    for pair in range(pairs):
        shared = {"pair": pair, "skeleton": f"s{pair // 2}", "m_base": -2.0, "m_donor": 2.0, "noise_floor": 1e-6}
        facts = {"kl": 0.1, "same_argmax": True, "notes_ahead": 2 * (pair % 2), "edit": "new", "tokens": 25.0}
        shared |= {**facts, "moved": 5.0, "compose_tokens": 40.0}
        rows.append({**shared, "regime": "recomputed", "arm": "full_reprefill", "margin": 2.0, "tokens": 100.0})
        for regime in ("recomputed", "composed_none"):
            shift = 0.0 if regime == "recomputed" else 4 * (apart + spread * (-1) ** (pair // 2))
            for arm in arms:
                margin = (-2.0 if arm == "stale" else 1.0) + shift
                rows.append({**shared, "regime": regime, "arm": arm, "margin": margin})
        for edit, trip, margin in (("once", 0, -1.0), ("return", 1, -0.6), ("return", 2, 0.2)):
            back = {**shared, "edit": edit, "trip": trip, "margin": margin}
            rows.append({**back, "regime": "composed_none", "arm": "erratum"})
    return pd.DataFrame(rows).assign(correct=lambda rows: rows["margin"] > 0)


def effects_of(rows: pd.DataFrame, margin: float = 0.1) -> dict[str, Effect]:
    return read_by(probe_of(equivalence_margin=margin), rows)


@settings(max_examples=6, deadline=None)
@given(apart=st.floats(-0.4, 0.4), spread=st.floats(0.001, 0.2), margin=st.floats(0.02, 0.3))
def test_summary_finds_what_was_put_in(apart: float, spread: float, margin: float) -> None:
    effects = effects_of(made_rows(apart, spread), margin)
    assert effects["recomputed.erratum.recovery"].estimate == pytest.approx(0.75)
    assert effects["composed_none.erratum.recovery"].estimate == pytest.approx(0.75 + apart)
    difference = effects["composed_none.field_only.difference"]
    assert difference.estimate == pytest.approx(apart, abs=1e-9)
    # By hand: the means of 8 skeletons are apart + spread and apart - spread, four times each.
    error = spread * np.sqrt(8 / 7) / np.sqrt(8)
    ought = max(stats.t.sf((apart + margin) / error, 7), stats.t.cdf((apart - margin) / error, 7))
    assert difference.extra["equivalence_p"] == pytest.approx(ought, rel=1e-6, abs=1e-12)
    assert difference.extra["equivalence_n"] == 8
    assert effects["composed_none.every_arm.equivalence_p"].estimate == pytest.approx(ought, rel=1e-6, abs=1e-12)
    largest = 4 * (abs(apart) + spread)
    assert effects["composed_none.every_arm.error"].estimate == pytest.approx(largest)
    assert effects["composed_none.fixed_edits.error"].estimate == pytest.approx(largest)
    for notes in (0, 2):
        found = effects[f"composed_none.ahead_{notes}.disagreement"].estimate
        assert found == pytest.approx((abs(apart + spread) + abs(apart - spread)) / 2)
    assert effects["composed_none.erratum.own_recovery"].estimate == pytest.approx(1.0)


def test_edits_that_choose_their_tokens_are_told_from_the_others() -> None:
    rows = made_rows(0.0, 0.01)
    there = (rows["regime"] == "composed_none") & (rows["arm"] == "field_only")
    rows.loc[there, "margin"] += 1.2
    apart = effects_of(rows)
    chosen = effects_of(rows.assign(arm=rows["arm"].replace("field_only", "deviation_3")))
    assert apart["composed_none.fixed_edits.equivalence_p"].estimate > 0.9
    assert chosen["composed_none.every_arm.equivalence_p"].estimate > 0.9
    assert chosen["composed_none.fixed_edits.equivalence_p"].estimate < 1e-6
    assert chosen["composed_none.fixed_edits.error"].estimate == pytest.approx(0.04)
    assert chosen["composed_none.every_arm.error"].estimate == pytest.approx(1.24)


def test_summary_of_costs_and_returns() -> None:
    effects = effects_of(made_rows(0.0, 0.01))
    assert effects["composed_none.erratum.token_share"].estimate == 0.25
    assert effects["composed_none.compose.token_share"].estimate == 0.4
    assert effects["composed_none.moved"].estimate == 5.0
    assert effects["composed_none.erratum.return_1.correct_rate"].estimate == 1.0
    assert effects["composed_none.erratum.return_2.correct_rate"].estimate == 0.0
    assert effects["composed_none.erratum.return.residue"].estimate == pytest.approx(0.3)
    one = made_rows(0.0, 0.01).assign(skeleton="s")
    assert "composed_none.every_arm.equivalence_p" not in effects_of(one)


def test_differences_that_claims_quote_are_those_of_the_papers_table() -> None:
    checked = 0
    for claim in load_config("keystone").claims:
        regime, arm, metric = (*claim.parsed.effect.split("."), "", "")[:3]
        for model, quoted in claim.paper_values.items() if metric == "difference" else ():
            values = paper_values(READING.paper, paper_model(model))
            difference = values[f"{regime}.{arm}.recovery"] - values[f"recomputed.{arm}.recovery"]
            assert quoted == pytest.approx(difference, abs=5e-4), (claim.id, model)
            checked += 1
    assert checked == 8


def test_the_task_puts_notes_ahead_and_leaves_the_rest() -> None:
    shared: dict[str, Any] = {"size": 12, "notes_before": (0, 2), "notes_after": (0, 2)}
    plain = list(GatedDecision(**shared).prompt_pairs())
    levels = set()
    for bare, pair in zip(plain, SkillDecision(**shared, notes_ahead=(0, 4)).prompt_pairs(), strict=True):
        count = int(pair.scenario.attributes["ahead"])
        levels.add(count)
        for ours, theirs in ((pair.base, bare.base), (pair.donor, bare.donor)):
            names = [segment.name for segment in ours.segments]
            assert names[: names.index("session")] == ["system", "ahead"][: 1 + bool(count)]
            rest = [segment for segment in ours.segments if segment.name != "ahead"]
            assert rest == list(theirs.segments)
            ahead = "".join(segment.text for segment in ours.segments if segment.name == "ahead")
            assert ahead.count("\n") == count
    assert levels == {0, 4}
    spans = align(next(SkillDecision(size=1).prompt_pairs()), TOKENIZER).base.spans
    held = [spans[name] for name in SKILL if name in spans]
    assert all(left.end == right.start for left, right in pairwise(held))


def test_what_cannot_be_a_skill_is_refused() -> None:
    spans = {"session": Span(0, 2), "field": Span(2, 3), "policy": Span(4, 6)}
    assert skill_span(spans, ("session", "field"), "field") == Span(0, 3)
    with pytest.raises(ConfigError, match="does not hold 'field'"):
        skill_span(spans, ("session",), "field")
    with pytest.raises(ConfigError, match="do not follow"):
        skill_span(spans, ("field", "policy"), "field")
    with pytest.raises(ConfigError, match="does not hold"):
        measured(worded("qwen3"), pairs_of(1), probe_of(skill=("policy",)))
