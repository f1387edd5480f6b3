"""AUTO and its signals: nothing is run before the choice, nothing dearer than an erratum is chosen."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worded_models import TOKENIZER, aligned, worded

from kvprobe.edit.auto import CANDIDATES, Auto, Case, candidate, token_shares
from kvprobe.edit.base import EDIT_METHODS, CachedPrompt
from kvprobe.edit.meter import Meter
from kvprobe.edit.signals import FREE, free_signals
from kvprobe.errors import SampleError
from kvprobe.probes.editing.auto.probe import second_edit
from kvprobe.probes.kit.edit_cases import edit_case, field_edit
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.two_fields import TwoFields


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
    for pair in aligned(TwoFields(size=3, joint=("none",))):
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
        for pair in aligned(task):
            prompt = CachedPrompt.prefilled(subject, pair.base.token_ids, pair.base.spans)
            found = free_signals(prompt, field_edit(pair, TOKENIZER))
            assert set(found) == set(FREE)
            # The rule names either value once.
            assert (found["old_value_mentions"], found["new_value_mentions"]) == (1, 1)
            assert found["distance"] == (len(pair.base.token_ids) - 1 - pair.field.end) / len(pair.base.token_ids)
            if "second_new" in pair.scenario.attributes:
                idle = free_signals(prompt, second_edit(pair, TOKENIZER))
                assert (idle["old_value_mentions"], idle["new_value_mentions"]) == (0, 0)
