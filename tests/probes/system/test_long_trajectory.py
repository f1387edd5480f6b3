"""Long trajectories: rows side by side against plain Hugging Face one by one, edits against the library's, the summary."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from agent_pairs import agent_pairs
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import effects_of, plain_logits, worded

from kvprobe.agents.conversation import FIELD, RULE, Conversation, conversation_of
from kvprobe.edit.base import CachedPrompt, make_method
from kvprobe.engine.forward import forward
from kvprobe.probes.system.long_trajectory.probe import FLOOR, LongTrajectory
from kvprobe.probes.system.long_trajectory.reading import slope
from kvprobe.probes.system.long_trajectory.trajectories import METHODS, Carried, Trajectories
from kvprobe.tasks.context import Span

EXACT = 1e-6
LAYOUT = {"wordings": ("manual",), "other_fields": (0, 0)}


def conversations(count: int) -> list[Conversation]:
    return [conversation_of(pair, worded("qwen3").tokenizer) for pair in agent_pairs(16, **LAYOUT)[:count]]


def same_layout(count: int) -> list[Conversation]:
    """Some conversations whose heads are of one length."""
    every = conversations(16)
    by_length: dict[int, list[Conversation]] = {}
    for each in every:
        by_length.setdefault(len(each.beginning({RULE: 0, FIELD: 0})[0]), []).append(each)
    return max(by_length.values(), key=len)[:count]


def text_by_hand(given: Conversation, method: str, values: list[int], answers: list[int]) -> tuple[int, ...]:
    """The tokens that a method holds at the last of some turns; `values` is the state in each."""
    in_place = METHODS[method].field is not None
    ids = list(given.beginning({RULE: 0, FIELD: values[-1] if in_place else 0})[0])
    errata = given.variables[FIELD].errata
    changes = [turn for turn in range(1, len(values)) if values[turn] != values[turn - 1]]
    kind = METHODS[method].erratum
    said = changes if kind == "kept" else changes[-1:] if kind == "current" else []
    for turn, value in enumerate(values):
        if turn in said:
            ids += errata[value]
        if turn < len(answers):
            ids += given.answered(answers[turn])
    return (*ids, *given.question)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_rows_side_by_side_are_plain_prefills_where_the_method_is_exact(family: str) -> None:
    subject, given = worded(family), same_layout(2)
    assert len(given) == 2
    values = [0, 1, 1, 0]
    for method in ("full_downstream", "errata_kept", "erratum"):
        carried = Carried(subject, Trajectories(given), METHODS[method])
        for turn, value in enumerate(values):
            if turn and value != values[turn - 1]:
                carried.change(value)
            logits, oracle = carried.ask(), carried.ask_oracle(value)
            for row, each in enumerate(given):
                answers = [past[row] for past in carried.answers]
                ids = text_by_hand(each, method, values[: turn + 1], answers)
                assert tuple(carried.running.ids[row].tolist()) + each.question == ids
                assert float((logits[row] - plain_logits(subject.model, ids)).abs().max()) < EXACT
                truth = text_by_hand(each, "full_downstream", values[: turn + 1], answers)
                assert float((oracle[row] - plain_logits(subject.model, truth)).abs().max()) < EXACT
            carried.remember([turn % 2, (turn + 1) % 2])


@pytest.mark.parametrize("method", ["field_only", "field_and_erratum"])
def test_edits_side_by_side_are_the_edit_methods_of_the_library(method: str) -> None:
    subject, given = worded("llama"), same_layout(2)
    carried = Carried(subject, Trajectories(given), METHODS[method])
    carried.ask()
    carried.remember([0, 1])
    carried.ask()
    carried.change(1)
    logits = carried.ask()
    for row, each in enumerate(given):
        ids, spans = each.beginning({RULE: 0, FIELD: 0})
        held = (*ids, *each.answered(row))
        asked = {**spans, "asked": Span(len(held), len(held) + 1)}
        stale = CachedPrompt.prefilled(subject, (*held, each.question[0]), asked)
        edited = make_method(method).apply(subject, stale, each.variables[FIELD].edit(FIELD, 1, "asked"))
        expected = forward(subject, each.question, edited.prompt.cache).logits
        assert float((logits[row] - expected).abs().max()) < EXACT


def test_a_full_prefill_takes_the_notes_away() -> None:
    subject, given = worded("qwen3"), same_layout(2)
    carried = Carried(subject, Trajectories(given), METHODS["periodic_reprefill"])
    carried.ask()
    carried.remember([0, 1])
    carried.ask()
    carried.change(1)
    assert float((carried.ask() - carried.ask_oracle(1)).abs().max()) > EXACT
    carried.prefill_again()
    assert float((carried.ask() - carried.ask_oracle(1)).abs().max()) < EXACT


def test_rows_have_every_method_turn_and_period() -> None:
    subject, pairs = worded("qwen3"), agent_pairs(2, **LAYOUT)
    probe = LongTrajectory(turns=6, periods=(1, 3), reprefill_every=2, floor_every=3)
    rows = pd.DataFrame(probe.measure(subject, pairs, lambda done, total: None))
    assert rows.groupby("method").size().to_dict() == dict.fromkeys(METHODS, 2 * 2 * 6) | {FLOOR: 2 * 2 * 2}
    error = rows.groupby("method")["margin_error"].max()
    assert error[["full_downstream", FLOOR]].max() < EXACT
    assert error[["field_only", "errata_kept", "erratum"]].min() > EXACT
    even = rows[(rows["method"] == "periodic_reprefill") & (rows["turn"] % 2 == 0)]
    assert even["margin_error"].max() < EXACT
    for period, part in rows[rows["method"] == "field_only"].groupby("period"):
        once = part[part["pair"] == 0].sort_values("turn")
        assert once["changed"].tolist() == [turn > 0 and turn % int(period) == 0 for turn in range(6)]
        assert (np.diff(once["right"]) != 0).tolist() == once["changed"].tolist()[1:]
    assert torch.tensor(rows[rows["method"] == "full_downstream"]["prompt_tokens"].to_numpy()).max() > 0


def made_rows(declines: bool) -> pd.DataFrame:
    """Ten trajectories of nine turns; `errata_kept` fails in the last third if it declines."""
    rows = crossed(turn=range(9), method=(*METHODS, FLOOR))
    turn, agrees = rows["turn"], ~(declines & rows["method"].eq("errata_kept") & rows["turn"].ge(6))
    told = {"changed": turn % 3 == 0, "right": turn // 3 % 2, "correct": agrees, "agrees": agrees}
    costs = {"margin_error": 0.1 * turn, "prompt_tokens": 50 + turn, "token_share": 0.1}
    return rows.assign(period=3, oracle_correct=True, **told, **costs)


@pytest.mark.parametrize("declines", [True, False])
def test_summary_finds_a_decline(declines: bool) -> None:
    effects = effects_of(LongTrajectory(turns=9, periods=(3,)), made_rows(declines))
    assert effects["errata_kept.period_3.last_third.agreement"].estimate == (0.0 if declines else 1.0)
    assert effects["errata_kept.period_3.first_third.agreement"].estimate == 1.0
    found = effects["errata_kept.period_3.agreement_slope"].estimate
    agreement = [1.0] * 6 + [0.0 if declines else 1.0] * 3
    assert found == pytest.approx(100 * np.polyfit(range(9), agreement, 1)[0], abs=1e-9)
    assert effects["erratum.period_3.margin_error_slope"].estimate == pytest.approx(10.0)
    assert effects["erratum.period_3.prompt_tokens"].estimate == 58
    assert effects["floor.period_3.agreement"].estimate == 1.0
    assert effects["baseline.majority.period_3.correct_rate"].estimate == pytest.approx(6 / 9)


@given(change=st.floats(-1, 1), levels=st.lists(st.floats(-5, 5), min_size=1, max_size=4))
def test_slope_does_not_see_the_levels_of_trajectories(change: float, levels: list[float]) -> None:
    turns = np.arange(7)
    rows = pd.concat(
        [pd.DataFrame({"pair": i, "turn": turns, "y": level + change * turns}) for i, level in enumerate(levels)]
    )
    assert slope(rows, "y") == pytest.approx(100 * change, abs=1e-6)
