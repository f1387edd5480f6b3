"""Agents: the task's conversations, prompts against plain Hugging Face, and tokens against a meter."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from agent_pairs import agent_pairs
from worded_models import TOKENIZER, plain_logits, worded

from kvprobe.agents.base import AGENTS, Agent, make_agent
from kvprobe.agents.conversation import CHUNK, FIELD, RULE, Conversation, conversation_of
from kvprobe.agents.unified import Unified
from kvprobe.edit.meter import Meter
from kvprobe.edit.splicing import with_segment_replaced
from kvprobe.errors import ConfigError, KvprobeError
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import align

EXACT = 1e-6
CELLS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def conversation(seed: int = 0, **parameters: object) -> Conversation:
    return conversation_of(agent_pairs(1, seed=seed, turns=6, **parameters)[0], TOKENIZER)


@pytest.mark.parametrize("slot", ["after_policy", "after_filler"])
def test_prompts_of_the_first_turn_are_those_of_the_pair(slot: str) -> None:
    for pair in agent_pairs(6, field_slots=(slot,)):
        given = conversation_of(pair, TOKENIZER)
        prompts = [pair.base, pair.donor, pair.variants["rule_changed"], pair.variants["both_changed"]]
        for (rule, value), prompt in zip(CELLS, prompts, strict=True):
            assert given.prompt({RULE: rule, FIELD: value}, ()) == prompt.token_ids


def test_the_right_answer_is_the_one_that_the_rule_in_the_prompt_names() -> None:
    for pair in agent_pairs(8, wordings=("manual",)):
        given = conversation_of(pair, TOKENIZER)
        for rule, value in CELLS:
            state = {RULE: rule, FIELD: value}
            text = TOKENIZER.decode(given.prompt(state, (0, 1)))
            cases = dict(re.findall(r"If the \w+ \w+ is (\w+) , then (\w+)", text))
            held = TOKENIZER.decode(given.variables[FIELD].values[value]).strip()
            assert cases[held] == TOKENIZER.decode([given.answers[given.right(state)]]).strip()


def test_hoisting_moves_the_line_of_the_state_and_nothing_else() -> None:
    given = conversation(1)
    state = {RULE: 1, FIELD: 1}
    plain, hoisted = given.prompt(state, (0, 1)), given.prompt(state, (0, 1), hoisted=True)
    line = (*given.line[0], *given.variables[FIELD].values[1], *given.line[1])
    place = len(hoisted) - len(given.question) - len(line)
    assert hoisted[place:] == (*line, *given.question)
    start = given.beginning(state)[1][FIELD].start - len(given.line[0])
    assert hoisted[:place] + given.question == plain[:start] + plain[start + len(line) :]


def test_every_round_of_changes_has_each_kind_once() -> None:
    for pair in agent_pairs(4, turns=9):
        words = pair.scenario.attributes["changes"].split()
        assert words[0] == "none"
        assert len(words) == 9
        for round_ in (words[1:5], words[5:9]):
            assert sorted(round_) == ["both", "field", "none", "rule"]


def test_pairs_of_another_task_are_refused() -> None:
    pair = align(next(iter(GatedDecision(size=1).prompt_pairs())), TOKENIZER)
    with pytest.raises(ConfigError, match="agent_turns"):
        conversation_of(pair, TOKENIZER)


AGENT_CASES: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in ("reprefill", "prefix_caching", "prefix_caching_hoist", "cacheblend")},
    **{
        f"unified {edit}": ("unified", {"edit": edit})
        for edit in ("field_only", "erratum", "field_and_erratum", "full_downstream", "full_reprefill")
    },
}


def test_every_agent_is_tested() -> None:
    assert {name for name, _ in AGENT_CASES.values()} == set(AGENTS.names())


@pytest.mark.parametrize("case", AGENT_CASES)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_receipts_say_what_a_meter_counts(case: str, family: str) -> None:
    name, parameters = AGENT_CASES[case]
    subject, given = worded(family), conversation()
    agent = make_agent(name, subject, given, **parameters)
    # CacheBlend looks for deviations in the first layers, and a receipt counts whole tokens of each pass.
    slack = 1.0 if name == "cacheblend" else 0.0
    for changes in given.changes:
        with Meter(subject) as meter:
            reply = agent.take_turn(changes)
        assert abs(meter.tokens - reply.tokens) <= slack
        assert reply.receipt.flops > 0
        assert reply.seconds >= reply.receipt.seconds * 0.99
        assert len(reply.token_ids) >= len(given.question)


@pytest.mark.parametrize("name", ["reprefill", "prefix_caching", "prefix_caching_hoist"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_exact_agents_are_plain_prefills_of_their_prompts(name: str, family: str) -> None:
    subject, given = worded(family), conversation(2)
    agent = make_agent(name, subject, given)
    for changes in given.changes:
        reply = agent.take_turn(changes)
        hoisted = name == "prefix_caching_hoist"
        assert reply.token_ids == given.prompt(agent.state, agent.answers[:-1], hoisted=hoisted)
        assert float((reply.logits - plain_logits(subject.model, reply.token_ids)).abs().max()) < EXACT
        first, second = (float(reply.logits[token]) for token in given.answers)
        assert reply.answer == int(second > first)


def tokens_of(agent: Agent) -> list[int]:
    return [agent.take_turn(changes).tokens for changes in agent.conversation.changes]


def test_unified_with_full_downstream_runs_what_prefix_caching_runs_but_for_the_policy() -> None:
    subject, given = worded("qwen3"), conversation(3)
    unified = tokens_of(make_agent("unified", subject, given, edit="full_downstream"))
    prefix = tokens_of(make_agent("prefix_caching", subject, given))
    chunk = sum(len(ids) for name, ids in given.head if name in CHUNK)
    assert unified[0] == prefix[0] - chunk
    assert unified[1:] == prefix[1:]
    assert sum(tokens_of(make_agent("prefix_caching_hoist", subject, given))) < sum(prefix)


@pytest.mark.parametrize("edit", ["full_downstream", "erratum", "field_only"])
def test_unified_without_composing_holds_what_the_edits_say(edit: str) -> None:
    """`full_prefill` composes nothing, so a full-downstream edit is exact and an erratum is the text with the line."""
    subject, given = worded("llama"), conversation(4)
    agent = make_agent("unified", subject, given, edit=edit, scheme="full_prefill")
    for turn, changes in enumerate([(), (FIELD,), (), (FIELD,)]):
        reply = agent.take_turn(changes)
        error = float((reply.logits - plain_logits(subject.model, reply.token_ids)).abs().max())
        text = TOKENIZER.decode(reply.token_ids)
        if edit == "erratum":
            assert error < EXACT
            said = [TOKENIZER.decode(line) for line in given.variables[FIELD].errata]
            assert (said[agent.state[FIELD]] in text) == (turn > 0)
            assert said[1 - agent.state[FIELD]] not in text
        else:
            assert reply.token_ids == given.prompt(agent.state, agent.answers[:-1])
            assert (error < EXACT) == (edit == "full_downstream" or turn == 0)


def test_a_rule_inside_the_compiled_policy_is_edited() -> None:
    subject, given = worded("qwen3"), conversation(5)
    agent = make_agent("unified", subject, given, edit="field_only")
    assert isinstance(agent, Unified)
    agent.take_turn()
    reply = agent.take_turn((RULE,))
    start, spans = given.beginning({RULE: 0, FIELD: 0})
    changed, _ = with_segment_replaced(start, spans, RULE, given.variables[RULE].values[1])
    assert changed != start
    assert reply.token_ids[: len(changed)] == changed
    assert agent.chosen == ("field_only",)


def test_own_answers_are_the_history() -> None:
    subject, given = worded("qwen3"), conversation(6)
    agents: list[Callable[[], Agent]] = [
        lambda: make_agent("reprefill", subject, given),
        lambda: make_agent("unified", subject, given, edit="full_downstream", scheme="full_prefill"),
    ]
    for make in agents:
        agent = make()
        replies = [agent.take_turn(changes) for changes in given.changes[:4]]
        assert agent.answers == [reply.answer for reply in replies]
        history = given.history(agent.answers[:-1])
        start = len(given.beginning(agent.state)[0])
        assert replies[-1].token_ids[start : start + len(history)] == history


@pytest.mark.parametrize("name", ["unified", "cacheblend"])
def test_a_policy_that_changes_in_the_first_turn_is_run_as_it_is_now(name: str) -> None:
    subject, given = worded("qwen3"), conversation()
    agent = make_agent(name, subject, given)
    reply = agent.take_turn([RULE])
    assert reply.token_ids == given.prompt(agent.state, ())
    torch.testing.assert_close(reply.logits.double(), plain_logits(subject.model, reply.token_ids), atol=EXACT, rtol=0)


def test_a_turn_that_fails_leaves_the_agent_usable() -> None:
    subject, given = worded("qwen3"), conversation()
    agent = make_agent("unified", subject, given, edit="hoist_to_end")
    first = agent.take_turn()
    with pytest.raises(ConfigError, match="nothing called 'nope'"):
        agent.take_turn([FIELD, "nope"])
    with pytest.raises(ConfigError, match="list"):
        agent.take_turn(FIELD)
    with pytest.raises(KvprobeError, match="before and after"):
        agent.take_turn([FIELD])
    assert agent.state == {RULE: 0, FIELD: 0}
    again = agent.take_turn()
    assert again.token_ids == given.prompt(agent.state, [first.answer])
    whole = plain_logits(subject.model, again.token_ids)
    composed_error = (first.logits.double() - plain_logits(subject.model, first.token_ids)).abs().max()
    assert (again.logits.double() - whole).abs().max() < max(10 * composed_error, EXACT)
