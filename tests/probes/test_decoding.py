"""Laws of what linear probes share: where a rule's cases stand, what is tested on what, what can be learned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worded_models import TOKENIZER, aligned

from kvprobe.errors import SampleError, UnsupportedError
from kvprobe.probes.kit.decoding import cross_predictions, prompt_splits
from kvprobe.probes.kit.rule_positions import labels, place_positions, rule_cases
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair

SPLITS = ("pair", "skeleton", "vocabulary", "wording", "field")


def words(pair: Pair, positions: list[int]) -> list[str]:
    return [TOKENIZER.decode([pair.base.token_ids[position]]).strip() for position in positions]


@given(seed=st.integers(0, 500))
def test_landmarks_are_where_the_text_says(seed: int) -> None:
    for pair in aligned(GatedDecision(size=3, seed=seed)):
        first, last = rule_cases(pair)
        policy = pair.base.spans["policy"]
        said = TOKENIZER.decode(pair.base.token_ids[policy.start : policy.end])
        old, new = pair.scenario.attributes["old"], pair.scenario.attributes["new"]
        assert first.fires_in_base == (said.index(f" {old} ") < said.index(f" {new} "))
        assert first.fires_in_base != last.fires_in_base
        assert words(pair, [first.value, last.value]) == ([old, new] if first.fires_in_base else [new, old])
        assert words(pair, place_positions(pair, ("first_case", "rule"))) == [".", "."]
        assert place_positions(pair, ("decision",)) == [pair.decision_position]
        assert labels(pair, "conclusion")[0] == first.fires_in_base
        for target in ("conclusion", "option", "other_xor", "field"):
            base, donor = labels(pair, target)
            assert base != donor


def test_a_rule_of_one_value_has_a_case_without_one() -> None:
    for pair in aligned(GatedDecision(size=6, rules=("trigger",))):
        first, last = rule_cases(pair)
        assert first.value is not None
        assert last.value is None
        assert words(pair, [last.end])[0] == "."


def test_a_segment_that_is_missing_is_named() -> None:
    (pair,) = aligned(GatedDecision(size=1))
    bare = {name: span for name, span in pair.base.spans.items() if name != "policy"}
    with pytest.raises(UnsupportedError, match="no segment 'policy'"):
        rule_cases(Pair(type(pair.base)(pair.base.token_ids, bare, ""), pair.donor, pair.field, 5, 6, pair.scenario))


@given(seed=st.integers(0, 500), split=st.sampled_from(SPLITS))
def test_tested_prompts_are_new_in_what_the_split_says(seed: int, split: str) -> None:
    pairs = aligned(GatedDecision(size=24, seed=seed, split="all"))
    usable = [number % 5 != 0 for number in range(len(pairs))]
    splits = prompt_splits(pairs, split, 3, seed, usable)  # type: ignore[arg-type]
    assert sorted(np.concatenate([test for _, test in splits])) == list(range(2 * len(pairs)))
    for train, test in splits:
        assert all(usable[prompt // 2] for prompt in train)
        assert not set(train) & set(test)
        old, new = ([pairs[prompt // 2].scenario for prompt in side] for side in (train, test))
        if split in ("skeleton", "vocabulary", "wording"):
            assert not {s.skeleton for s in old} & {s.skeleton for s in new}
        if split == "vocabulary":
            kept = [
                {word for s in side for word in (s.attributes["entity"], s.attributes["field"])} for side in (old, new)
            ]
            assert not kept[0] & kept[1]
        if split == "wording":
            assert not {s.wording for s in old} & {s.wording for s in new}
        if split == "field":
            assert {prompt % 2 for prompt in train}.isdisjoint({prompt % 2 for prompt in test})


def test_without_a_pair_to_train_on_there_is_no_probe() -> None:
    pairs = aligned(GatedDecision(size=6))
    with pytest.raises(SampleError, match="no pair to train on"):
        prompt_splits(pairs, "skeleton", 2, 0, [False] * 6)


@pytest.mark.parametrize("split", SPLITS)
def test_what_a_probe_can_learn_from(split: str) -> None:
    pairs = aligned(GatedDecision(size=60))
    splits = prompt_splits(pairs, split, 3, 0, [True] * 60)  # type: ignore[arg-type]
    generator = np.random.Generator(np.random.PCG64(1))
    truth = np.array([label for pair in pairs for label in labels(pair, "conclusion")])[:, None]
    noise = generator.standard_normal((120, 40))
    direction = generator.standard_normal(40)

    def accuracy(features: np.ndarray, target: np.ndarray) -> float:
        return float((cross_predictions(features.astype(np.float32), target, splits) == target).mean())

    assert accuracy(noise + 2 * np.where(truth, direction, -direction), truth) == 1.0
    flips = np.repeat(generator.integers(0, 2, 60).astype(bool), 2)[:, None]
    planted = noise + np.where(truth, direction, -direction)
    # Labels at random are not learned from features that hold the conclusion.
    assert 0.3 < accuracy(planted, truth ^ flips) < 0.7
    # The rule's words, which a pair's prompts share, give every pair one right and one wrong answer, ...
    shared = np.repeat(generator.standard_normal((60, 800)), 2, axis=0)
    memorised = accuracy(shared, truth)
    # ... and where the other prompt of the pair was learned, only wrong ones.
    assert memorised < 0.1 if split == "field" else memorised == 0.5
