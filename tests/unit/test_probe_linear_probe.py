"""Laws of the linear probes: what they are trained on, what they can and cannot learn, what they read."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worded_models import TOKENIZER, aligned, labelled, worded

from kvprobe.errors import SampleError, UnsupportedError
from kvprobe.figures.panel import Panel
from kvprobe.probes.kit.decoding import cross_predictions, prompt_splits, residuals
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.rule_positions import labels, place_positions, rule_cases
from kvprobe.probes.mechanism.linear_probe.probe import LinearProbe, decision_residuals
from kvprobe.stats import StatisticsConfig
from kvprobe.tasks.context import tokenize
from kvprobe.tasks.gated import with_erratum
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


def probe(**parameters: object) -> LinearProbe:
    return LinearProbe(LinearProbe.Parameters(**{"folds": 2, "inner_folds": 2, **parameters}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows() -> tuple[list[Pair], pd.DataFrame]:
    pairs = aligned(GatedDecision(size=16))
    measured = probe().measure(worded("qwen3"), pairs, lambda done, total: None)
    return pairs, labelled(measured, pairs)


def test_what_both_prompts_share_is_read_the_same_in_both(rows: tuple[list[Pair], pd.DataFrame]) -> None:
    probes = rows[1][rows[1]["measurement"] == "probe"]
    # Embeddings of tokens after the field are equal in a pair's two prompts, whose labels are opposite.
    embedded = probes[(probes["layer"] == 0) & (probes["place"] != "field") & (probes["split"] != "field")]
    assert len(embedded) > 100
    assert (embedded["right_base"] != embedded["right_donor"]).all()


def test_every_pair_is_tested_once_in_each_way_and_has_one_chosen_layer(rows: tuple[list[Pair], pd.DataFrame]) -> None:
    pairs, table = rows
    probes = table[table["measurement"] == "probe"]
    ways = probes.groupby(["split", "target", "draw", "place", "layer"])["pair"]
    assert (ways.nunique() == len(pairs)).all()
    assert (ways.size() == len(pairs)).all()
    assert (probes[probes["chosen"]].groupby(["pair", "place"])["layer"].nunique() == 1).all()
    names = {effect.name for effect in LinearProbe().summarise(table, StatisticsConfig())}
    assert {
        "conclusion.rule.accuracy",
        "conclusion.rule.in_sample",
        "selectivity.rule",
        "shuffled.rule.accuracy",
    } <= names
    assert {f"readout.{arm}.says_new" for arm in ("stale", "in_place", "erratum", "full")} <= names
    assert "option.rule.accuracy" not in names


def test_accuracy_is_that_of_a_script_with_hugging_face_and_numpy_alone(rows: tuple[list[Pair], pd.DataFrame]) -> None:
    pairs, table = rows
    model = worded("qwen3").model
    features, truth = [], []
    for pair in pairs:
        rule_end = max(place_positions(pair, ("first_case", "rule")))
        for side, prompt in enumerate((pair.base, pair.donor)):
            with torch.no_grad():
                states = model(torch.tensor([prompt.token_ids]), output_hidden_states=True).hidden_states
            features.append(states[2][0, rule_end].numpy())
            truth.append(1.0 if labels(pair, "conclusion")[side] else -1.0)
    x, y = np.array(features), np.array(truth)
    skeletons = np.repeat([pair.scenario.skeleton for pair in pairs], 2)
    right = np.zeros(len(y), dtype=bool)
    for train, test in prompt_splits(pairs, "skeleton", 2, 0, [True] * len(pairs)):
        assert not set(skeletons[train]) & set(skeletons[test])
        standard = (x - x[train].mean(0)) / x[train].std(0)
        gram = standard[train].T @ standard[train] + x.shape[1] * np.eye(x.shape[1])
        weights = np.linalg.solve(gram, standard[train].T @ (y[train] - y[train].mean()))
        right[test] = ((standard[test] @ weights + y[train].mean()) > 0) == (y[test] > 0)
    chosen = table[(table["split"] == "skeleton") & (table["target"] == "conclusion") & (table["place"] == "rule")]
    ours = chosen[chosen["layer"] == 2].sort_values("pair")[["right_base", "right_donor"]].to_numpy(dtype=bool)
    assert (ours.reshape(-1) == right).all()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_arms_are_the_prompts_they_stand_for(family: str) -> None:
    subject = worded(family, torch.float32)
    task = GatedDecision(size=1, seed=3)
    (pair,), (text,) = aligned(task), list(task.prompt_pairs())
    unedited = prefill_pair(subject, pair)
    arms = decision_residuals(subject, pair, unedited)
    said = pair.scenario.attributes
    amended = with_erratum(text.base, pair.scenario.wording, said["entity"], said["field"], said["new"])
    prompts = {"stale": pair.base, "full": pair.donor, "erratum": tokenize(amended, TOKENIZER)}
    for arm, prompt in prompts.items():
        whole = residuals(subject, prompt.token_ids, [-1])[0]
        assert np.allclose(arms[arm], whole, atol=1e-3), arm
    assert not np.allclose(arms["in_place"], arms["stale"], atol=1e-3)


def test_the_figure_shows_the_accuracy_of_the_rows(rows: tuple[list[Pair], pd.DataFrame]) -> None:
    table = rows[1]
    effects = {effect.name: effect for effect in LinearProbe().summarise(table, StatisticsConfig())}
    figure = LinearProbe().plot([Panel("measured", effects, table), Panel("absent", note="fails the gate")])
    curves = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert curves["conclusion, decision token"][0] == 0.5
    best = effects["conclusion.rule.in_sample"].estimate
    assert max(curves["conclusion, end of the rule"]) == pytest.approx(best)
