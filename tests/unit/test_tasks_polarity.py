"""The square of field and trigger, scenarios with shared actions, and pairs with variants."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from worded_models import TOKENIZER, aligned

from kvprobe.errors import AlignmentError
from kvprobe.tasks.context import Context
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.pairs import PromptPair, align
from kvprobe.tasks.polarity import Polarity
from kvprobe.tasks.shared_actions import SharedActions


def decided(context: Context) -> str:
    """The action that the memo's rule calls for, read from its text alone."""
    texts = {segment.name: segment.text for segment in context.segments}
    rule = texts["policy"] + texts["trigger"] + texts["policy_rest"]
    found = re.fullmatch(r"Rules\n\w+ = (\w+) means (\w+)\.\nall else means (\w+)\.\n", rule)
    assert found is not None
    trigger, first, second = found.groups()
    return first if texts["field"].strip() == trigger else second


def test_an_independent_reading_of_the_rule_gives_the_conclusion_of_every_cell() -> None:
    for pair in Polarity(size=60, wordings=("memo",)).prompt_pairs():
        assert decided(pair.base) == decided(pair.variants["both_changed"]) == pair.base_answer
        assert decided(pair.donor) == decided(pair.variants["field_changed"]) == pair.donor_answer
        assert pair.base_answer != pair.donor_answer


def test_the_cells_differ_in_field_and_trigger_alone() -> None:
    for pair in aligned(Polarity(size=30)):
        field, trigger = pair.base.spans["field"], pair.base.spans["trigger"]
        assert pair.field == trigger
        differing = {
            name: {i for i, (a, b) in enumerate(zip(pair.base.token_ids, cell.token_ids, strict=True)) if a != b}
            for name, cell in {"donor": pair.donor, **pair.variants}.items()
        }
        assert differing["donor"] == set(trigger.positions)
        assert differing["field_changed"] == set(field.positions)
        assert differing["both_changed"] == set(field.positions) | set(trigger.positions)


def test_neither_the_first_action_nor_the_rules_own_is_right_more_often() -> None:
    pairs = list(Polarity(size=600).prompt_pairs())
    equal = sum(pair.scenario.attributes["equal"] == "True" for pair in pairs)
    natural = {skeleton.name: skeleton.actions[0] for skeleton in skeletons()}
    first = sum(natural[pair.scenario.skeleton] == pair.base_answer for pair in pairs)
    assert 240 < equal < 360
    assert 240 < first < 360


def test_a_rule_of_cases_has_no_trigger() -> None:
    with pytest.raises(ValueError, match="trigger"):
        Polarity(rules=("cases",))  # type: ignore[arg-type]


def test_a_variant_that_stands_elsewhere_is_refused_and_its_segment_named() -> None:
    pair = next(iter(Polarity(size=1).prompt_pairs()))
    longer = replace(pair, variants={"longer": pair.base.replace("conversation", "User: hurry up, please.\n")})
    with pytest.raises(AlignmentError, match=r"'longer'.*conversation differs"):
        align(longer, TOKENIZER)


def test_variants_belong_to_the_base_and_are_left_out_of_the_reversed_pair() -> None:
    (pair,) = aligned(Polarity(size=1))
    assert set(pair.variants) == {"field_changed", "both_changed"}
    assert pair.reversed().variants == {}
    assert pair.reversed().base == pair.donor


def test_the_changed_segment_must_exist() -> None:
    pair = next(iter(Polarity(size=1).prompt_pairs()))
    plain = PromptPair(pair.base, pair.donor, pair.base_answer, pair.donor_answer, pair.scenario, changed="rule")
    with pytest.raises(AlignmentError, match="no segment named 'rule'"):
        align(plain, TOKENIZER)


def test_scenarios_share_their_actions_evenly_over_wordings() -> None:
    pairs = list(SharedActions(size=60).prompt_pairs())
    counts = Counter((frozenset((p.base_answer, p.donor_answer)), p.scenario.wording) for p in pairs)
    assert len(counts) == 2 * 3
    assert set(counts.values()) == {10}
    assert len({pair.scenario.skeleton for pair in pairs}) == 30
    # The action of a value is drawn for each pair: the answer cannot be known from the field alone.
    assert {pair.base_answer for pair in pairs} == {"approve", "reject", "accept", "decline"}
