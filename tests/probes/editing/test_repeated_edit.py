"""Chains of edits: their order, the stack of errata against plain Hugging Face, and the summary."""

from __future__ import annotations

from functools import cache

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import TOKENIZER, aligned, effects_of, plain_logits, worded

from kvprobe.edit.meter import Meter
from kvprobe.probes.editing.repeated_edit.probe import ARMS, KINDS, RepeatedEdit, StackedErrata, chain_of
from kvprobe.probes.kit.field_states import BOTH, FIELDS, TwoFieldCase, two_field_case
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.two_fields import TwoFields
from kvprobe.tasks.wordings import WORDINGS

EXACT = 1e-5


@cache
def case_of(joint: str, family: str = "qwen3") -> TwoFieldCase:
    (pair,) = aligned(TwoFields(size=1, joint=(joint,), seed=1))
    return two_field_case(worded(family), pair)


@given(seed=st.text(max_size=5), joint=st.sampled_from(["own", "and"]), edits=st.integers(1, 30))
def test_chains_go_to_and_fro_and_say_what_a_decision_turns_on(seed: str, joint: str, edits: int) -> None:
    case = case_of(joint)
    steps = chain_of(case, edits, seed)
    assert [step.number for step in steps] == list(range(1, edits + 1))
    assert steps == chain_of(case, edits, seed)
    state = {name: values[0] for name, values in case.values.items()}
    held = {name: [state[name]] for name in FIELDS}
    for step in steps:
        assert step.value != state[step.field]
        returned = {step.field: step.value in held[step.field]}
        state[step.field] = step.value
        held[step.field].append(step.value)
        about = step.field if step.question.name == BOTH else step.question.name
        if len(held[about]) == 1:
            assert step.kind == "untouched"
        else:
            again = returned[about] if about in returned else held[about].count(state[about]) > 1
            assert step.kind == ("return" if again else "first")


@pytest.mark.parametrize("joint", ["own", "and"])
def test_full_downstream_follows_and_cheaper_arms_do_not(joint: str) -> None:
    case = case_of(joint)
    probe = RepeatedEdit(edits=5)
    rows = pd.DataFrame(probe.measure(worded("qwen3"), [case.pair], lambda done, total: None))
    assert len(rows) == 5 * len(ARMS)
    error = rows.groupby("arm")["margin_error"].max()
    assert error["full_downstream"] < EXACT
    assert error.drop("full_downstream").min() > 1e-3
    lengths = rows.pivot(index="edit", columns="arm", values="prompt_tokens")
    assert (lengths["full_downstream"] == len(case.pair.base.token_ids)).all()
    assert lengths["stacked_errata"].is_monotonic_increasing
    assert lengths["stacked_errata"].iloc[-1] > lengths["erratum"].iloc[-1]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_stack_holds_every_erratum_in_order(family: str) -> None:
    case = case_of("and", family)
    pair, context = case.pair, case.context.copy()
    said: list[int] = []
    style, attributes = WORDINGS.get(pair.scenario.wording)(), pair.scenario.attributes
    for place, name in (*((0, name) for name in FIELDS), (1, "field"), (0, "field")):
        value = case.values[name][1 - place]
        with Meter(worded(family)) as meter:
            cost = context.set(name, value, StackedErrata())
        assert cost.tokens == meter.tokens
        prefix = "second_" if name == "second_field" else ""
        about = attributes[f"{prefix}entity"], attributes[f"{prefix}field"], value
        said += encode_segment(style.update(*about), TOKENIZER)
    task = pair.base.spans["task"].start
    ids = [*pair.base.token_ids[:task], *said, *pair.base.token_ids[task:]]
    assert list(context.token_ids) == ids
    logits = context.prompt.decide(worded(family)).logits.double()
    assert float((logits - plain_logits(worded(family).model, ids)).abs().max()) < EXACT


def made_rows(right: dict[tuple[str, str], int]) -> pd.DataFrame:
    """Ten pairs and four edits; an arm is right on the first so many pairs at each kind of decision."""
    rows = crossed(arm=ARMS, edit=[1, 2, 3, 4])
    rows = rows.assign(kind=rows["edit"].map({1: "untouched", 2: "first", 3: "return", 4: "return"}))
    correct = [row.pair < right.get((row.arm, row.kind), 10) for row in rows.itertuples()]
    share = rows["arm"].ne("stale").map({True: 0.2})
    told = {"correct": correct, "agrees": correct, "prefill_correct": True, "margin_error": rows["edit"].astype(float)}
    return rows.assign(token_share=share, **told)


@settings(max_examples=2)
@given(stacked=st.integers(0, 10), first=st.integers(0, 10))
def test_summary_finds_what_was_put_in(stacked: int, first: int) -> None:
    rows = made_rows({("stacked_errata", "return"): stacked, ("erratum", "first"): first})
    effects = effects_of(RepeatedEdit(edits=4, window=2), rows)
    assert effects["stacked_errata.return.correct_rate"].estimate == pytest.approx(stacked / 10)
    assert effects["stacked_errata.edits_4.error_rate"].estimate == pytest.approx(1 - stacked / 10)
    assert effects["stacked_errata.edits_2.error_rate"].estimate == 0.0
    assert effects["erratum.edits_2.error_rate"].estimate == pytest.approx((1 - first / 10) / 2)
    assert effects["current_over_stacked.return.difference"].estimate == pytest.approx(1 - stacked / 10)
    assert effects["erratum.margin_error"].estimate == 4.0
    assert "stale.token_share" not in effects
    assert {f"full_downstream.{kind}.error_rate" for kind in KINDS} <= set(effects)
    assert effects["baseline.first_option.correct_rate"].estimate == 1.0
