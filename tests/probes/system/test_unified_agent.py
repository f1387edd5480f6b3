"""The unified agent's probe: rows against plain Hugging Face, the gate, and the summary."""

from __future__ import annotations

import pandas as pd
import pytest
from agent_pairs import agent_pairs
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import effects_of, margin_behind, measured, worded

from kvprobe.agents.conversation import FIELD, RULE
from kvprobe.probes.kit.agent_cases import CELLS, agent_case, auto_cases
from kvprobe.probes.system.unified_agent.probe import BASELINES, UnifiedAgent

EXACT = 1e-6


def test_the_gate_reads_the_worst_of_all_four_combinations() -> None:
    subject, (pair,) = worded("qwen3"), agent_pairs(1, seed=2)
    case = agent_case(subject, pair)
    margins = {}
    for rule, value in CELLS:
        state = {RULE: rule, FIELD: value}
        right = case.conversation.right(state)
        ids = case.conversation.prompt(state, (right, 1 - right) if rule else ())
        margins[rule, value] = margin_behind(subject, pair, ids)
    assert case.common["m_base"] == pytest.approx(max(margins[0, 0], margins[1, 1]), abs=EXACT)
    assert case.common["m_donor"] == pytest.approx(min(margins[0, 1], margins[1, 0]), abs=EXACT)
    assert case.common["noise_floor"] < EXACT


def test_auto_learns_from_one_edit_of_each_variable() -> None:
    cases = auto_cases(agent_case(worded("llama"), agent_pairs(1)[0]))
    rule, state = cases
    assert len(cases) == 2
    # The rule stands before the state.
    assert rule.signals["distance"] > state.signals["distance"]
    assert set(rule.agrees) == {"stale", "field_only", "selective_4", "erratum"}


def test_rows_compare_every_agent_with_prefills_of_its_own_tokens_and_of_the_truth() -> None:
    subject, pairs = worded("qwen3"), agent_pairs(3, turns=3)
    probe = UnifiedAgent(edits=("auto", "full_downstream"))
    rows = measured(probe, subject, pairs)
    assert len(rows) == 3 * 3 * (len(BASELINES) + 2)
    by_agent = rows.groupby("agent")
    exact = by_agent["own_error"].max()
    assert exact[["reprefill", "prefix_caching", "prefix_caching_hoist"]].max() < EXACT
    assert exact[["unified_full_downstream", "cacheblend"]].min() > EXACT
    assert by_agent["truth_error"].max()[["reprefill", "prefix_caching"]].max() < EXACT
    same = rows[rows["agent"].isin(["reprefill", "prefix_caching"])].pivot(index=["pair", "turn"], columns="agent")
    assert (same["answer"]["reprefill"] == same["answer"]["prefix_caching"]).all()
    tokens = rows.pivot_table(index=["pair", "turn"], columns="agent", values="tokens")
    assert (
        tokens["reprefill"] == rows[rows["agent"] == "reprefill"].set_index(["pair", "turn"])["prompt_tokens"]
    ).all()
    assert (tokens["unified_full_downstream"] < tokens["reprefill"]).all()
    compiled = rows.groupby("agent")["compile_tokens"].min()
    assert (compiled[["unified_auto", "unified_full_downstream", "cacheblend"]] > 0).all()
    assert not compiled[["reprefill", "prefix_caching", "prefix_caching_hoist"]].any()
    chosen = rows[(rows["agent"] == "unified_auto") & ~rows["changed"].isin(["first", "none"])]["method"]
    assert (chosen.str.len() > 0).all()
    effects = effects_of(probe, rows)
    totals = rows.groupby("agent")["tokens"].sum()
    ratio = totals["unified_full_downstream"] / totals["reprefill"]
    assert effects["unified_full_downstream.token_ratio"].estimate == pytest.approx(ratio)
    assert effects["reprefill.token_ratio"].estimate == 1.0
    later = rows[rows["turn"] > 0].groupby("agent")["tokens"].sum()
    expected = later["unified_full_downstream"] / later["prefix_caching"]
    found = effects["unified_full_downstream.later.token_ratio_to_prefix_caching"].estimate
    assert found == pytest.approx(expected)


def made_rows(right: int) -> pd.DataFrame:
    """Ten conversations of three turns; `unified_erratum` is right in so many of them."""
    rows = crossed(turn=range(3), agent=["reprefill", "prefix_caching", "unified_erratum"])
    unified, ought = rows["agent"] == "unified_erratum", (rows["pair"] + rows["turn"]) % 2
    correct = ~unified | (rows["pair"] < right)
    answer = ought.where(correct, 1 - ought)
    answers = {"answer": answer, "own_answer": answer, "truth_answer": ought, "own_error": 0.0, "truth_error": 1.0}
    return rows.assign(
        changed=rows["turn"].map({0: "first", 1: "field", 2: "rule"}),
        tokens=rows["agent"].map({"reprefill": 100, "prefix_caching": 50, "unified_erratum": 20}),
        seconds=rows["agent"].eq("reprefill") + 1.0,
        compile_tokens=40 * unified,
        **answers | {"correct": correct, "flops": 10, "baseline_same": 0.0},
    )


@given(right=st.integers(0, 10))
def test_summary_finds_what_was_put_in(right: int) -> None:
    effects = effects_of(UnifiedAgent(), made_rows(right))
    assert effects["unified_erratum.truth.agreement"].estimate == pytest.approx(right / 10)
    assert effects["unified_erratum.rule.correct_rate"].estimate == pytest.approx(right / 10)
    assert effects["unified_erratum.own.agreement"].estimate == 1.0
    assert effects["unified_erratum.truth.kappa"].estimate == pytest.approx(2 * right / 10 - 1)
    assert effects["unified_erratum.later.token_ratio_to_prefix_caching"].estimate == pytest.approx(0.4)
    assert effects["unified_erratum.with_compiling.token_ratio"].estimate == pytest.approx((60 + 40) / 300)
    assert effects["unified_erratum.speed_up"].estimate == pytest.approx(2.0)
    assert "reprefill.with_compiling.token_ratio" not in effects
