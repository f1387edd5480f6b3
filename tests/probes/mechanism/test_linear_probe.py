"""Laws of the linear probes' measurement, and the same against Hugging Face and numpy alone."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from worded_models import TOKENIZER, aligned, effects_of, measured, worded

from kvprobe.probes.kit.decoding import prompt_splits, residuals
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.rule_positions import labels, place_positions
from kvprobe.probes.mechanism.linear_probe.probe import LinearProbe
from kvprobe.probes.mechanism.linear_probe.readout import decision_residuals
from kvprobe.tasks.context import tokenize
from kvprobe.tasks.gated import with_erratum
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair


@pytest.fixture(scope="module")
def rows() -> tuple[list[Pair], pd.DataFrame]:
    pairs = aligned(GatedDecision(size=16))
    return pairs, measured(LinearProbe(folds=2, inner_folds=2), worded("qwen3"), pairs)


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
    # The options are not named yet at the end of the rule.
    effects = effects_of(LinearProbe(), table)
    assert "option.rule.accuracy" not in effects
    assert "option.task.accuracy" in effects


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
