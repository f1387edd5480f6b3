"""Edits of two fields: the questions, their right answers, and every arm against plain Hugging Face."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import TOKENIZER, aligned, effects_of, plain_logits, worded

from kvprobe.probes.editing.multi_field.probe import ARMS, FLIPS, MultiField
from kvprobe.probes.kit.field_states import BOTH, two_field_case
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.two_fields import TwoFields
from kvprobe.tasks.wordings import WORDINGS

EXACT = 1e-5


def pairs_of(size: int, joint: str, **parameters: Any) -> list[Pair]:
    return aligned(TwoFields(size=size, joint=(joint,), **parameters))


@pytest.mark.parametrize("split", ["held_out", "all"])
def test_right_answers_are_those_of_the_rule_in_the_prompt(split: str) -> None:
    subject = worded("qwen3")
    for pair in pairs_of(6, "and", wordings=("manual",), split=split):
        (question,) = two_field_case(subject, pair).questions
        rule = r"If the \w+ \w+ is (\w+) and the \w+ \w+ is (\w+), then (\w+)\."
        first, second, action = re.search(rule, pair.base.text).groups()  # type: ignore[union-attr]
        assert question.name == BOTH
        for state, right in question.right.items():
            assert (right == action) == (state == (first, second))
    for pair in pairs_of(6, "own", wordings=("manual",), split=split):
        rules = dict(re.findall(r"If the \w+ \w+ is (\w+), then (\w+)\.", pair.base.text))
        questions = two_field_case(subject, pair).questions
        assert len(questions) == 2
        for place, question in enumerate(questions):
            assert all(right == rules[state[place]] for state, right in question.right.items())
            assert all({*question.answers} == {*question.right.values()} for question in questions)


def by_hand(pair: Pair, flips: tuple[str, ...], arm: str) -> list[int]:
    """The prompt that an arm's cache stands for, written down without the library's editing."""
    attributes, ids = pair.scenario.attributes, list(pair.base.token_ids)
    keys = {"field": ("entity", "field", "new"), "second_field": ("second_entity", "second_field", "second_new")}
    said: list[int] = []
    for name in flips:
        about = [attributes[key] for key in keys[name]]
        if arm == "full_downstream":
            ids[pair.base.spans[name].start] = encode_segment(f" {about[2]}", TOKENIZER)[0]
        elif arm == "erratum":
            said += encode_segment(WORDINGS.get(pair.scenario.wording)().update(*about), TOKENIZER)
    task = pair.base.spans["task"].start
    return [*ids[:task], *said, *ids[task:]]


@pytest.mark.parametrize("joint", ["own", "and"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_arms_are_plain_hugging_face_on_prompts_written_by_hand(family: str, joint: str) -> None:
    subject, (pair,) = worded(family), pairs_of(1, joint, seed=3)
    rows = pd.DataFrame(MultiField().measure(subject, [pair], lambda done, total: None))
    case = two_field_case(subject, pair)
    assert len(rows) == len(ARMS) * len(FLIPS) * len(case.questions)
    first, question = rows[rows["question"] == case.questions[0].name], case.questions[0]
    found = first.set_index(["arm", "flip"])["margin"]
    for flip, fields in FLIPS.items():
        state = tuple(case.values[name][name in fields] for name in case.values)
        ought = question.right[state]  # type: ignore[index]
        (other,) = {*question.answers} - {ought}
        for arm in ("stale", "erratum", "full_downstream"):
            logits = plain_logits(subject.model, by_hand(pair, fields, arm))
            right, wrong = (encode_segment(f" {answer}", TOKENIZER)[0] for answer in (ought, other))
            assert found[arm, flip] == pytest.approx(float(logits[right] - logits[wrong]), abs=EXACT)
    full = rows[rows["arm"] == "full_downstream"]
    assert full["margin_error"].max() < EXACT
    assert full["agrees"].all()
    if family == "qwen3":  # through tiny sliding windows the fields hardly reach the decision
        assert rows[(rows["arm"] == "field_only") & (rows["flip"] == "both")]["margin_error"].max() > 1e-3
    assert rows["noise_floor"].max() < EXACT


def test_the_second_question_is_asked_by_its_own_task() -> None:
    subject, (pair,) = worded("qwen3"), pairs_of(1, "own")
    case, attributes = two_field_case(subject, pair), pair.scenario.attributes
    second = case.questions[1]
    span = pair.base.spans["task"]
    style = WORDINGS.get(pair.scenario.wording)()
    actions = [attributes["second_old_action"], attributes["second_new_action"]]
    task = encode_segment(style.task(attributes["second_field"], actions), TOKENIZER)
    ids = [*pair.base.token_ids[: span.start], *task, *pair.base.token_ids[span.end :]]
    logits = plain_logits(subject.model, ids).log_softmax(-1)
    for answer, found in case.ask(case.context, second).log_probabilities.items():
        assert found == pytest.approx(float(logits[encode_segment(f" {answer}", TOKENIZER)[0]]), abs=EXACT)


def made_rows(right: dict[str, int]) -> pd.DataFrame:
    """Ten pairs with one question; an arm is right on the first so many of the decisions that must turn."""
    rows = crossed(arm=ARMS, flip=FLIPS)
    changed = rows["flip"].isin(["first", "both"])
    correct = ~changed | (rows["pair"] < rows["arm"].map(right).fillna(0))
    share = rows["flip"].ne("none").map({True: 0.5})
    told = {"changed": changed, "correct": correct, "agrees": correct, "prefill_correct": rows["pair"] > 0}
    return rows.assign(question="field", margin_error=0.25, token_share=share, **told)


@settings(max_examples=2)
@given(erratum=st.integers(0, 10), field=st.integers(0, 10))
def test_summary_finds_what_was_put_in(erratum: int, field: int) -> None:
    effects = effects_of(MultiField(), made_rows({"erratum": erratum, "field_only": field}))
    assert effects["erratum.changed.correct_rate"].estimate == pytest.approx(erratum / 10)
    assert effects["erratum.changed.error_rate"].estimate == pytest.approx(1 - erratum / 10)
    assert effects["erratum.second.correct_rate"].estimate == 1.0
    assert effects["erratum.both.correct_rate"].estimate == pytest.approx(erratum / 10)
    assert effects["erratum.unchanged.correct_rate"].estimate == 1.0
    assert effects["field_alone.changed.difference"].estimate == pytest.approx(field / 10)
    assert effects["full_prefill.error_rate"].estimate == pytest.approx(0.1)
    assert effects["baseline.majority.correct_rate"].estimate == 0.5
    assert effects["full_downstream.margin_error"].estimate == 0.25
    assert effects["erratum.token_share"].estimate == 0.5
