"""Laws of the SAE probe, its choice of features against scikit-learn, and the whole chain in plain float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sae_lens import SAE
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from tiny_models import tiny, tokens
from transformers import AutoModelForCausalLM
from worded_models import effects_of, measured

from kvprobe.engine.components import ActivationEdit, add, components
from kvprobe.engine.readout import Readout
from kvprobe.errors import ConfigError, SampleError, StoreError, UnsupportedError
from kvprobe.models.loader import load_subject
from kvprobe.probes.kit.training_pairs import training_pairs
from kvprobe.probes.mechanism.sae import training as sae_training
from kvprobe.probes.mechanism.sae.features import areas, choose_features, matched_units, placements
from kvprobe.probes.mechanism.sae.notes import Notes, clamp, with_error_term
from kvprobe.probes.mechanism.sae.probe import SparseAutoencoder
from kvprobe.probes.mechanism.sae.training import (
    SAESettings,
    fraction_unexplained,
    load_sae,
    train_sae,
    trained_sae,
    training_fvu,
)
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, align

HOOK = "blocks.1.hook_resid_post"
PROMPTS = [tuple(tokens(20, seed)) for seed in range(12)]
SMALL = SAESettings(features=48, k=4, vectors=2048, batch_size=64, learning_rate=5e-3)
ORGANISM = "qwen3-note-taker"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "cache"))


def saved(path: Path) -> list[Path]:
    return list((path / "cache" / "saes").glob("*"))


def test_a_saved_sae_is_an_ordinary_saelens_sae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny("qwen3")
    ours = trained_sae(subject, HOOK, PROMPTS, SMALL)
    (folder,) = saved(tmp_path)
    loaded = SAE.load_from_disk(folder)
    activations = components(subject).capture(tokens(15, 99), [HOOK]).activations[HOOK]
    assert torch.equal(loaded(activations), ours(activations))
    assert loaded.cfg.architecture() == "topk"
    assert loaded.cfg.metadata.hook_name == HOOK
    assert int((loaded.encode(activations) > 0).sum(-1).max()) <= SMALL.k
    torch.testing.assert_close(loaded.W_dec.norm(dim=-1), torch.ones(SMALL.features))
    monkeypatch.setattr(sae_training, "train_sae", lambda *_: pytest.fail("it was trained again"))
    assert torch.equal(trained_sae(subject, HOOK, PROMPTS, SMALL)(activations), ours(activations))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "missing"])
def test_a_damaged_sae_is_trained_again(tmp_path: Path, damage: str) -> None:
    subject = tiny("qwen3")
    # A copy: the weights are mapped from the file that is changed.
    first = trained_sae(subject, HOOK, PROMPTS, SMALL).W_dec.clone()
    (folder,) = saved(tmp_path)
    file = next(file for file in folder.iterdir() if file.suffix == ".safetensors")
    whole = file.read_bytes()
    damaged = {"cut": whole[:-100], "flipped": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b"", "missing": whole}
    file.write_bytes(damaged[damage])
    if damage == "missing":
        next(file for file in folder.iterdir() if file.suffix == ".json").unlink()
    again = trained_sae(subject, HOOK, PROMPTS, SMALL)
    assert torch.equal(again.W_dec, first)
    assert saved(tmp_path) == [folder]
    assert file.read_bytes() == whole


def test_training_is_deterministic_leaves_the_global_generator_alone_and_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (train_sae(tiny("llama"), HOOK, PROMPTS, SMALL) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    other = train_sae(tiny("llama"), HOOK, PROMPTS, SMALL.model_copy(update={"seed": 1}))
    assert not torch.equal(other.W_dec, first.W_dec)
    assert capsys.readouterr() == ("", "")


def test_training_explains_variance_and_notes_what_it_leaves() -> None:
    vectors = sae_training.activation_vectors(tiny("qwen3"), HOOK, PROMPTS)
    assert vectors.shape == (12 * 19, 32)  # the first token of each prompt is left out
    short = train_sae(tiny("qwen3"), HOOK, PROMPTS, SMALL.model_copy(update={"vectors": 64}))
    long = train_sae(tiny("qwen3"), HOOK, PROMPTS, SMALL.model_copy(update={"vectors": 8192}))
    assert fraction_unexplained(long, vectors) < 0.8 * fraction_unexplained(short, vectors)
    assert training_fvu(long) == fraction_unexplained(long, vectors)


@pytest.mark.parametrize(
    ("hook", "prompts", "settings"),
    [
        ("blocks.0.hook_resid_post", PROMPTS, SMALL),
        (HOOK, PROMPTS[1:], SMALL),
        (HOOK, PROMPTS, SMALL.model_copy(update={"k": 5})),
    ],
)
def test_whatever_determines_an_sae_is_in_its_name(hook: str, prompts: Any, settings: SAESettings) -> None:
    names = {sae_training._key(tiny("qwen3"), *what) for what in ((HOOK, PROMPTS, SMALL), (hook, prompts, settings))}
    assert len(names) == 2


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device")

    broken = SimpleNamespace(save_inference_model=fail)
    monkeypatch.setattr(sae_training, "train_sae", lambda *_: broken)
    with pytest.raises(StoreError, match="No space left"):
        trained_sae(tiny("qwen3"), HOOK, PROMPTS, SMALL)
    assert saved(tmp_path) == []


def test_too_few_vectors_are_refused() -> None:
    with pytest.raises(SampleError, match="less than a batch"):
        train_sae(tiny("qwen3"), HOOK, PROMPTS[:1], SMALL)


def notes_of(subject: Any, sae: Any, seed: int) -> tuple[Notes, list[int]]:
    places, reading = (5, 9), Readout(0.0, 0.5, 0.5, 1.0, 0)
    prompts = tokens(14, seed), tokens(14, seed + 1)
    captured = [components(subject).capture(ids, [HOOK]).activations[HOOK] for ids in prompts]
    residuals = torch.stack([activation[list(places)] for activation in captured])
    activations = sae.encode(residuals).flatten(1).double().numpy()
    return Notes(places, (True, False), (reading, reading), residuals, activations, captured[0][1:]), prompts[0]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_clamping_features_to_their_own_values_changes_nothing(family: str) -> None:
    subject = tiny(family)
    sae = trained_sae(subject, HOOK, PROMPTS, SMALL)
    for seed in (1, 7, 30):
        notes, ids = notes_of(subject, sae, seed)
        own, donor = notes.activations
        same, all_features = clamp(sae, notes, 0, [own, donor])
        assert not same.any()
        torch.testing.assert_close(with_error_term(sae, notes.residuals), notes.residuals, atol=1e-4, rtol=1e-5)
        full = notes.residuals[1] - notes.residuals[0]
        errors = [residual - sae(residual) for residual in notes.residuals]
        torch.testing.assert_close(all_features + errors[1] - errors[0], full, atol=1e-4, rtol=1e-5)
        edits = [
            ActivationEdit(HOOK, add(same), notes.places, no_op=True),
            ActivationEdit(HOOK, lambda activation: with_error_term(sae, activation), notes.places, no_op=True),
            ActivationEdit(HOOK, add(all_features), notes.places),
        ]
        clean, clamped, rebuilt, moved = components(subject).run(ids, [[], *([edit] for edit in edits)])
        torch.testing.assert_close(clamped, clean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rebuilt, clean, atol=1e-3, rtol=1e-3)
        assert (moved - clean).abs().max() > 1e-2


@given(seed=st.integers(0, 999), prompts=st.integers(4, 30), levels=st.integers(2, 9))
def test_areas_and_placements_are_those_of_scikit_learn(seed: int, prompts: int, levels: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    activations = generator.integers(0, levels, (prompts, 3)).astype(float)
    labels = np.stack([generator.permutation(np.arange(prompts) % 2 == 0) for _ in range(2)])
    for row, areas_of_row in zip(labels, areas(activations, labels), strict=True):
        for unit, area in enumerate(areas_of_row):
            expected = roc_auc_score(row, activations[:, unit])
            assert area == pytest.approx(expected)
            placed = placements(activations[:, unit], row)
            assert placed[row].mean() == pytest.approx(expected)
            assert placed[~row].mean() == pytest.approx(expected)


def noise(seed: int, pairs: int = 20, units: int = 30) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.Generator(np.random.PCG64(seed))
    first = generator.random(pairs) < 0.5
    return generator.exponential(size=(pairs, 2, units)), np.stack([first, ~first], axis=1)


def test_a_planted_feature_is_found_and_noise_is_not_taken_for_one() -> None:
    activations, conclusions = noise(0)
    activations[..., 4] = 0  # never active
    assert 4 not in choose_features(activations, conclusions, 0.05, 99, 0).ranked
    with pytest.raises(SampleError, match="No feature is active"):
        choose_features(np.zeros((4, 2, 3)), conclusions[:4], 0.05, 99, 0)
    activations[..., 17] = np.where(conclusions, 0.0, 2.0)
    choice = choose_features(activations, conclusions, 0.05, 199, 0)
    assert (choice.ranked[0], choice.auc[17]) == (17, 0.0)
    assert list(choice.means[:, 17]) == [2.0, 0.0]
    assert choice.p_value == pytest.approx(1 / 200)
    chance = [choose_features(*noise(seed), 0.05, 99, 0).p_value for seed in range(1, 61)]
    # Uniform under the null: 60 draws stay within 4 standard errors of one half, and few fall below 0.05.
    assert abs(np.mean(chance) - 0.5) < 4 / np.sqrt(12 * 60)
    assert sum(p < 0.05 for p in chance) <= 9


@given(seed=st.integers(0, 99), count=st.integers(1, 12))
def test_controls_are_active_unchosen_and_at_the_same_place(seed: int, count: int) -> None:
    activations, conclusions = noise(seed)
    activations[..., :6] = 0
    choice = choose_features(activations, conclusions, 0.05, 99, 0)
    matched = matched_units(choice, count, 2, np.random.Generator(np.random.PCG64(seed)))
    units, controls = zip(*matched, strict=True)
    assert len(set(controls)) == len(controls)
    assert not set(controls) & set(choice.ranked[:count])
    assert set(controls) <= set(choice.ranked)
    assert set(units) <= set(choice.ranked[:count])
    assert all(unit // 15 == control // 15 for unit, control in matched)


SIZES = (1, 3)


def organism_rows() -> tuple[pd.DataFrame, list[Pair], Any]:
    subject = load_subject(ORGANISM)
    pairs = [align(prompts, subject.tokenizer) for prompts in GatedDecision(size=6, seed=1).prompt_pairs()]
    probe = SparseAutoencoder(
        sae=SAESettings(features=128, k=8, vectors=6000, batch_size=200),
        training_pairs=12,
        site_pairs=4,
        sizes=SIZES,
        folds=2,
        permutations=99,
        draws=1,
        cause_pairs=2,
    )
    return measured(probe, subject, pairs), pairs, subject


def test_the_whole_probe_on_an_organism(tmp_path: Path) -> None:
    rows, pairs, subject = organism_rows()
    decisions = rows[rows["measurement"] == "decision"]
    margins = decisions.pivot_table(index="pair", columns="intervention", values="margin")
    common = decisions.groupby("pair")[["m_base", "m_donor"]].first()
    assert margins["self_clamp"].sub(common["m_base"]).abs().max() < 1e-2
    assert rows["noise_floor"].max() < 1e-2
    # The conclusion is noted at the actions of the rule among other places, so the donor's residual stream there
    # carries part of the donor's decision.
    full = (margins["full"] - common["m_base"]).sum() / (common["m_donor"] - common["m_base"]).sum()
    assert 0.2 < full < 1.2
    effects = effects_of(SparseAutoencoder(sizes=SIZES), rows)
    assert 0 < effects["fvu.training"].estimate < effects["fvu.held_out"].estimate < 1
    assert effects["full.recovery"].estimate == pytest.approx(full)
    check_in_float64(rows, pairs, subject, load_file(saved(tmp_path)[0] / "sae_weights.safetensors"))


def check_in_float64(rows: pd.DataFrame, pairs: list[Pair], subject: Any, weights: dict[str, torch.Tensor]) -> None:
    """The margin under `held_out_1` of every pair, from the prompts, the model and the SAE's weights alone."""
    model = AutoModelForCausalLM.from_pretrained(subject.identity.source, dtype=torch.float64).eval()
    w = {name: tensor.double() for name, tensor in weights.items()}
    layer = int(rows["layer"].iloc[0])

    def encode(x: torch.Tensor) -> torch.Tensor:
        before = (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
        top = before.topk(8, dim=-1)
        return torch.zeros_like(before).scatter(-1, top.indices, top.values.relu())

    states, firsts, places = [], [], []
    for pair in pairs:
        policy = pair.base.spans["policy"]
        text = pair.base.token_ids[policy.start : policy.end]
        at = [policy.start + text.index(answer) for answer in (pair.base_answer_id, pair.donor_answer_id)]
        firsts.append(at[0] < at[1])  # the base's case is the first one
        places.append(sorted(at))
        with torch.no_grad():
            for context in (pair.base, pair.donor):
                hidden = model(torch.tensor([context.token_ids]), output_hidden_states=True).hidden_states
                states.append(encode(hidden[layer + 1][0, sorted(at)]))
    conclusions = [value for first in firsts for value in (first, not first)]
    decoding = rows[(rows["measurement"] == "decoding") & (rows["selection"] == "held_out")].groupby("pair").first()
    for number, pair in enumerate(pairs):
        chosen = decoding.loc[number]
        place, feature = int(chosen["place"]), int(chosen["feature"])
        others = [2 * i + j for i in range(len(pairs)) if decoding.loc[i, "fold"] != chosen["fold"] for j in (0, 1)]
        alike = [states[i][place, feature] for i in others if conclusions[i] == conclusions[2 * number + 1]]
        step = (torch.stack(alike).mean() - states[2 * number][place, feature]) * w["W_dec"][feature]

        def shift(module: Any, inputs: Any, output: torch.Tensor, at: int = places[number][place], step=step) -> Any:
            moved = output.clone()
            moved[0, at] += step
            return moved

        handle = model.model.layers[layer].register_forward_hook(shift)
        with torch.no_grad():
            logits = model(torch.tensor([pair.base.token_ids])).logits[0, -1]
        handle.remove()
        row = rows[(rows["pair"] == number) & (rows["intervention"] == "held_out_1")].iloc[0]
        # Half a percent of the gap: rounding may swap two features at the border of the top k.
        assert row["margin"] == pytest.approx(
            float(logits[pair.donor_answer_id] - logits[pair.base_answer_id]), abs=0.1
        )


def test_evaluation_never_shares_a_skeleton_with_training() -> None:
    subject = load_subject(ORGANISM)
    pairs = [align(prompts, subject.tokenizer) for prompts in GatedDecision(size=20, split="train").prompt_pairs()]
    with pytest.raises(SampleError, match="share the skeleton"):
        training_pairs(subject, "gated_decision", 10, 0, like=pairs)
    with pytest.raises(ConfigError, match="has no training split"):
        training_pairs(subject, "own_prompt", 10, 0, like=pairs)


def made_rows(recoveries: dict[str, float], gaps: list[float]) -> pd.DataFrame:
    """Rows of pairs whose base has margin -1, and whose interventions recover just so."""
    rows: list[dict[str, Any]] = []
    for pair, gap in enumerate(gaps):
        common = {"pair": pair, "skeleton": f"s{pair}", "m_base": -1.0, "m_donor": gap - 1.0, "noise_floor": 1e-9}
        for name, recovery in recoveries.items():
            part = {"measurement": "decision", "intervention": name, "margin": recovery * gap - 1, "flipped": False}
            rows.append(common | part)
        for feature, auc in enumerate((1.0, 0.7, 0.5)):
            margin = (0.1 + feature * 0.2) * gap - 1  # what tells least moves most
            part = {"measurement": "feature", "place": 0, "feature": feature, "auc": auc, "margin": margin}
            rows.append(common | part)
        for name in ("held_out", "in_sample"):
            for prompt in range(2):
                part = {"measurement": "decoding", "selection": name, "fold": pair % 2, "conclusion": prompt == 0}
                told = {"activation": float(prompt == 0) + 10 * (pair % 2 if name == "held_out" else 0)}
                rest = {"p_value": 0.01, "null_auc": 0.7, "active_features": 40, "strong_features": 2}
                rows.append(common | part | told | rest)
        errors = {"squared_error": 1.0, "variance": 10.0, "squared_error_places": 2.0, "variance_places": 4.0}
        losses = {"loss_clean": 0.1, "loss_spliced": 0.2, "loss_ablated": 1.1, "fvu_training": 0.05}
        rows.append(common | {"measurement": "reconstruction"} | errors | losses)
    return pd.DataFrame(rows)


def test_summary_finds_what_was_put_in() -> None:
    recoveries = {
        "held_out_3": 0.5,
        "in_sample_3": 0.6,
        "matched_3": 0.1,
        "full": 0.8,
        "self_clamp": 0.0,
        "necessity_3": 0.7,
    }
    gaps = [2.0 + number for number in range(10)]
    effects = effects_of(SparseAutoencoder(), made_rows(recoveries, gaps))
    expected = {
        "held_out_3.recovery": 0.5,
        "in_sample_3.recovery": 0.6,
        "lead_3.recovery": 0.4,
        "held_out_3.share_of_full": 0.5 / 0.8,
        "necessity_3.drop": 0.3,
        "self_clamp.error": 0.0,
        "fvu.held_out": 0.1,
        "fvu.places": 0.5,
        "fvu.training": 0.05,
        "loss_recovered.decision": 0.9,
        "best_feature_auc.held_out": 1.0,
        "best_feature_auc.in_sample": 1.0,
        "selection.p_value": 0.01,
        "strong_features.count": 2,
        "decoding_against_cause.rank_correlation": -1.0,
        "best_decoder.recovery": 0.1,
        "best_cause.auc": 0.5,
    }
    assert {name: effects[name].estimate for name in expected} == pytest.approx(expected)


def test_prompts_unlike_the_training_prompts_are_refused() -> None:
    from kvprobe.probes.mechanism.sae.site import Site

    subject = load_subject(ORGANISM)
    pair = align(next(iter(GatedDecision(size=1).prompt_pairs())), subject.tokenizer)
    with pytest.raises(UnsupportedError, match="the same segments"):
        Site(HOOK, 1, {}, ()).places(pair, 1)


def test_a_loaded_sae_is_frozen(tmp_path: Path) -> None:
    trained_sae(tiny("qwen3"), HOOK, PROMPTS, SMALL)
    sae = load_sae(saved(tmp_path)[0], torch.device("cpu"))
    assert not sae.training
    assert not any(parameter.requires_grad for parameter in sae.parameters())
