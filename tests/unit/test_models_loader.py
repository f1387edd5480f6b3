"""Loading folders and organisms, and refusing what would mislead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_files import TEXT, make_model, make_tokenizer, write_folder, write_organism
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS
from transformers import DynamicCache

from kvprobe.errors import ConfigError, ModelSourceError, NumericsError, OutOfMemoryError, UnsupportedError
from kvprobe.models import memory
from kvprobe.models.files import sha256_of, sha256_of_all
from kvprobe.models.loader import load_subject
from kvprobe.models.sources.directory import INDEX, weight_files


def logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_folder_loads_as_it_was_written(tmp_path: Path, family: str) -> None:
    written = write_folder(tmp_path / "m", family)
    subject = load_subject(str(tmp_path / "m"), device="cpu", attention="eager")
    ids = subject.tokenizer(TEXT).input_ids
    assert ids == [9, 20, 33, 7]
    assert torch.equal(logits(subject.model, ids), logits(written, ids))
    assert not subject.model.training
    assert not any(parameter.requires_grad for parameter in subject.model.parameters())


def test_identity_says_what_was_loaded(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "m", "gemma2")
    identity = load_subject(str(tmp_path / "m"), device="cpu").identity
    assert identity.name == "m"
    assert identity.architecture == "gemma2"
    assert identity.weights_sha256 == sha256_of(tmp_path / "m" / "model.safetensors")
    assert (identity.dtype, identity.attention, identity.device) == ("float32", "eager", "cpu")
    assert identity.parameters == sum(parameter.numel() for parameter in written.parameters())


def test_an_organism_is_stored_in_half_and_used_in_full_precision(tmp_path: Path) -> None:
    written = write_organism(tmp_path / "fly")
    subject = load_subject(str(tmp_path / "fly"), device="cpu", attention="eager")
    assert subject.dtype == torch.float32
    # Not `written.float()`: its RoPE frequencies went through float16 with the weights.
    exact = make_model(CONFIGS["qwen3"])
    exact.load_state_dict(written.state_dict())
    assert torch.equal(logits(subject.model, [4, 5, 6]), logits(exact, [4, 5, 6]))


def test_shards_load_and_hash_together(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "m", max_shard_size="20KB")
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 1
    subject = load_subject(str(tmp_path / "m"), device="cpu", attention="eager")
    assert torch.equal(logits(subject.model, [4, 5]), logits(written, [4, 5]))
    assert subject.identity.weights_sha256 == sha256_of_all(reversed(shards))
    shards[1].unlink()
    with pytest.raises(ModelSourceError, match=f"lacks the shard '{shards[1].name}'"):
        load_subject(str(tmp_path / "m"))


_JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_folder(folder := tmp_path_factory.mktemp("sharded") / "m", max_shard_size="20KB")
    return folder


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_an_index_that_is_not_as_it_was_written_loads_the_same_or_is_one_sentence(
    sharded: Path, data: st.DataObject
) -> None:
    file = sharded / INDEX
    whole = file.read_text()
    index = json.loads(whole)
    name, shard = data.draw(st.sampled_from(sorted(index["weight_map"].items())))
    wrong = data.draw(
        _JSON | st.sampled_from(["../m/" + shard, str(sharded / shard), "config.json", "a\0", "b" * 5000])
    )
    changes: list[Any] = [
        wrong,
        {"weight_map": wrong},
        {**index, "metadata": wrong},
        {"weight_map": index["weight_map"]},
    ]
    changes.append({**index, "weight_map": {**index["weight_map"], name: wrong}})
    text = data.draw(st.sampled_from([*map(json.dumps, changes), "[" * 10**5, whole[: data.draw(st.integers(0, 40))]]))
    told = str(sharded)
    try:
        file.write_text(text)
        assert weight_files(sharded) == sorted(sharded.glob("*.safetensors"))
        load_subject(str(sharded), device="cpu")
    except ModelSourceError as error:
        told = str(error)
    finally:
        file.write_text(whole)
    assert str(sharded) in told
    assert "\n" not in told


def test_settings_are_obeyed(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    path = str(tmp_path / "m")
    assert load_subject(path, dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    assert load_subject(path, dtype=torch.float64, device="cpu").identity.dtype == "float64"
    assert load_subject(path, device="cpu").identity.attention == "sdpa"
    with pytest.raises(ConfigError, match=r"no dtype 'int3'"):
        load_subject(path, dtype="int3")
    with pytest.raises(ConfigError, match=r"no device 'abacus'"):
        load_subject(path, device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"sees no CUDA device"):
            load_subject(path, device="cuda")


def test_a_kernel_that_is_not_exact_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "gemma2")
    with pytest.raises(UnsupportedError, match=r"'sdpa' is not exact for m \(Gemma2\).*use 'eager'"):
        load_subject(str(tmp_path / "m"), attention="sdpa")


def test_chat_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs" / "models"
    write_folder(folder / "plain")
    tokenizer = make_tokenizer()
    write_folder(folder / "talks")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder / "talks")
    for name, path, chat in (("mute", "talks", "false"), ("loud", "plain", "true"), ("open", "talks", "true")):
        (folder / f"{name}.yaml").write_text(f"tier: local\nsource: directory\npath: {path}\nchat: {chat}\n")
    assert load_subject("mute", device="cpu").tokenizer.chat_template is None
    assert load_subject("open", device="cpu").tokenizer.chat_template
    with pytest.raises(ConfigError, match=r"'loud' has no chat template; write 'chat: false'"):
        load_subject("loud", device="cpu")


def test_wrong_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_organism(tmp_path / "fly", weights_sha256="0" * 64)
    with pytest.raises(ModelSourceError, match=r"model\.safetensors has sha256 .* pinned 0000.*train it again"):
        load_subject(str(tmp_path / "fly"))
    write_organism(tmp_path / "bee", weights_sha256=None)
    with pytest.raises(ModelSourceError, match=r"card\.json does not pin its weights"):
        load_subject(str(tmp_path / "bee"))
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "configs" / "models" / "m")
    yaml = f"tier: local\nsource: directory\npath: m\nsha256: {'ab' * 32}\n"
    (tmp_path / "configs" / "models" / "pinned.yaml").write_text(yaml)
    with pytest.raises(ModelSourceError, match=r"not the pinned abab"):
        load_subject("pinned")


@pytest.mark.parametrize("kept", [0, 5, 2000, -1])
def test_weights_cut_short(tmp_path: Path, kept: int) -> None:
    write_folder(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelSourceError, match=r"model\.safetensors is cut short.*again"):
        load_subject(str(tmp_path / "m"))


def test_missing_weights_are_never_invented(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelSourceError, match=r"holds no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_subject(str(tmp_path / "m"), device="cpu")


def test_weights_of_another_shape(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(ModelSourceError, match=str(tmp_path / "m")):
        load_subject(str(tmp_path / "m"), device="cpu")


def test_unknown_architecture(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "perceptron9"}))
    with pytest.raises(UnsupportedError, match=r"m is refused: Model type 'perceptron9' has no architecture adapter"):
        load_subject(str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"holds no config\.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": '), r"config\.json is cut short"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"must hold a JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no model\.safetensors"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), r"no usable tokenizer"),
    ],
)
def test_a_damaged_folder(tmp_path: Path, damage: Any, message: str) -> None:
    write_folder(tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(ModelSourceError, match=message):
        load_subject(str(tmp_path / "m"), device="cpu")


def test_a_folder_named_in_yaml_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "models").mkdir(parents=True)
    (tmp_path / "configs" / "models" / "gone.yaml").write_text("tier: local\nsource: directory\npath: nowhere\n")
    with pytest.raises(ModelSourceError, match=r"no folder .*nowhere; correct the path of model 'gone'"):
        load_subject("gone")


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "m")
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    with pytest.raises(OutOfMemoryError, match=r"m needs about .* GB for its weights in float32, and cpu has 0\.00 GB"):
        load_subject(str(tmp_path / "m"), device="cpu")


def test_available_memory_is_plausible() -> None:
    free = memory.available_bytes(torch.device("cpu"))
    assert free is None or 0 <= free < 1 << 50


@pytest.mark.parametrize(("limit", "free"), [("max\n", None), ("1000\n", 550), ("100\n", 0)])
def test_memory_of_a_control_group(tmp_path: Path, limit: str, free: int | None) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 150\n")
    assert memory._control_group_available(tmp_path) == free


def test_a_model_that_drops_its_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "m")

    def drop(self: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        return keys, values

    monkeypatch.setattr(DynamicCache, "update", drop)
    with pytest.raises(UnsupportedError, match=r"leaves 0 in its KV cache"):
        load_subject(str(tmp_path / "m"), device="cpu")


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=r"m computes logits that are not finite"):
        load_subject(str(tmp_path / "m"), device="cpu")


def test_loading_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "m")
    capfd.readouterr()
    load_subject(str(tmp_path / "m"), device="cpu")
    assert capfd.readouterr() == ("", "")
