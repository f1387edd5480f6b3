"""AUTO and its signals: nothing is run before the choice, nothing dearer than an erratum is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worded_models import TOKENIZER, worded

from kvprobe.edit.auto import CANDIDATES, Auto, Case, candidate, token_shares
from kvprobe.edit.base import EDIT_METHODS, CachedPrompt
from kvprobe.edit.meter import Meter
from kvprobe.edit.signals import FREE, free_signals
from kvprobe.errors import ConfigError, SampleError
from kvprobe.probes.editing.auto.probe import AutoProbe, auto_name, second_edit
from kvprobe.probes.kit.edit_cases import edit_case, field_edit
from kvprobe.stats import StatisticsConfig
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, align
from kvprobe.tasks.two_fields import TwoFields


def pairs_of(size: int, **parameters: Any) -> list[Pair]:
    return [align(pair, TOKENIZER) for pair in TwoFields(size=size, **parameters).prompt_pairs()]


def signals(**known: float) -> dict[str, float]:
    return {name: known.get(name, 0.0) for name in FREE}


def cases(count: int = 40) -> list[Case]:
    """Edits of which those whose old value is mentioned need an amendment."""
    made = []
    for number in range(count):
        mentioned = number % 2 == 1
        agrees = dict.fromkeys(CANDIDATES, not mentioned) | {"erratum": True}
        made.append(Case(signals(old_value_mentions=float(mentioned), distance=number / count), agrees))
    return made


SHARES = {"stale": 0.0, "field_only": 0.01, "selective_4": 0.05, "erratum": 0.25}


def test_auto_amends_what_a_rule_mentions_and_leaves_the_rest() -> None:
    auto = Auto.fit(cases(), error_cost=3)
    assert auto.choose(signals(old_value_mentions=1.0, distance=0.5), SHARES) == "erratum"
    assert auto.choose(signals(distance=0.5), SHARES) == "stale"


def test_the_dearer_an_error_the_more_is_paid() -> None:
    doubtful = signals(old_value_mentions=0.5, distance=0.5)
    choices = [Auto.fit(cases(), error_cost=cost).choose(doubtful, SHARES) for cost in (0.0, 0.1, 1.0, 100.0)]
    assert choices[0] == "stale"
    assert choices[-1] == "erratum"
    assert [SHARES[name] for name in choices] == sorted(SHARES[name] for name in choices)


@given(
    probabilities=st.lists(st.floats(0, 1), min_size=len(CANDIDATES), max_size=len(CANDIDATES)),
    cost=st.floats(0, 1000),
)
def test_the_choice_has_the_least_expected_loss(probabilities: list[float], cost: float) -> None:
    models: Mapping[str, float] = dict(zip(CANDIDATES, probabilities, strict=True))
    losses = {name: cost * (1 - models[name]) + SHARES[name] for name in CANDIDATES}
    assert losses[Auto(models, cost).choose(signals(), SHARES)] == min(losses.values())


def test_auto_needs_something_to_learn_from() -> None:
    with pytest.raises(SampleError, match="edits to learn from"):
        Auto.fit([])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_auto_runs_no_more_tokens_than_an_erratum_and_makes_the_chosen_edit(family: str) -> None:
    subject = worded(family)
    auto = Auto.fit(cases(), error_cost=10)
    for pair in pairs_of(3, joint=("none",)):
        case = edit_case(subject, pair)
        edit = case.edit
        shares = token_shares(case.stale, edit)
        assert all(share <= shares["erratum"] for share in shares.values())
        name = auto.chosen(case.stale, edit)
        assert name in shares
        edited = candidate(name).apply(subject, case.stale, edit)
        with Meter(subject) as meter:
            again = auto.apply(subject, case.stale, edit)
        # Choosing runs nothing: what is counted is the chosen edit alone.
        assert meter.tokens == auto.tokens(case.stale, edit)
        assert meter.tokens <= EDIT_METHODS.get("erratum")().tokens(case.stale, edit)
        assert again.prompt.token_ids == edited.prompt.token_ids
        assert again.prompt.cache.fingerprint() == edited.prompt.cache.fingerprint()


def test_signals_count_mentions() -> None:
    subject = worded("qwen3")
    for task in (GatedDecision(size=6, other_fields=(0, 0)), TwoFields(size=6, joint=("none",), other_fields=(0, 0))):
        for prompt_pair in task.prompt_pairs():
            pair = align(prompt_pair, TOKENIZER)
            prompt = CachedPrompt.prefilled(subject, pair.base.token_ids, pair.base.spans)
            found = free_signals(prompt, field_edit(pair, TOKENIZER))
            assert set(found) == set(FREE)
            # The rule names either value once.
            assert (found["old_value_mentions"], found["new_value_mentions"]) == (1, 1)
            assert found["distance"] == (len(pair.base.token_ids) - 1 - pair.field.end) / len(pair.base.token_ids)
            if "second_new" in pair.scenario.attributes:
                idle = free_signals(prompt, second_edit(pair, TOKENIZER))
                assert (idle["old_value_mentions"], idle["new_value_mentions"]) == (0, 0)


def test_the_probe_compares_policies_on_the_same_edits() -> None:
    subject, pairs = worded("qwen3"), pairs_of(9, joint=("own", "and", "none"))
    probe = AutoProbe(AutoProbe.Parameters(folds=3, error_costs=(10.0, 0.1)))
    rows = pd.DataFrame(probe.measure(subject, pairs, lambda done, total: None))
    rows["skeleton"] = [pairs[pair].scenario.skeleton for pair in rows["pair"]]
    policies = rows.groupby("policy").size()
    assert set(policies) == {18}
    assert {auto_name(10.0), auto_name(0.1), "cheapest_right", "always_erratum"} <= set(policies.index)
    for _, edit in rows.groupby(["pair", "edit"]):
        by_policy = edit.set_index("policy")
        right = by_policy[by_policy.index.str.startswith("always_") & ~by_policy["error"]]
        if len(right):
            assert not by_policy.loc["cheapest_right", "error"]
            assert by_policy.loc["cheapest_right", "token_share"] == right["token_share"].min()
        assert by_policy.loc[auto_name(10.0), "token_share"] <= by_policy.loc["always_erratum", "token_share"]
    effects = {effect.name: effect for effect in probe.summarise(rows, StatisticsConfig())}
    assert effects["auto_less_erratum.most_tokens"].estimate <= 0
    assert effects["auto.loss"].estimate == pytest.approx(
        10 * effects["auto.error_rate"].estimate + effects["auto.token_share"].estimate
    )
    assert effects["cheapest_right.error_rate"].estimate <= effects["always_erratum.error_rate"].estimate
    assert {"baseline.first_option.correct_rate", "baseline.refuse.correct_rate"} <= set(effects)


def test_the_probe_needs_a_second_field() -> None:
    pair = align(next(iter(GatedDecision(size=1).prompt_pairs())), TOKENIZER)
    with pytest.raises(ConfigError, match="two_fields"):
        second_edit(pair, TOKENIZER)
