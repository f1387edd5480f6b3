"""Whatever changes a logit or a token changes a model's identity, or the model does not load."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models_files import TEXT, write_folder, write_gguf, write_organism
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import build, tiny, tokens
from transformers import AutoModelForCausalLM, LlamaConfig

from kvprobe.composing.chunk import precompile
from kvprobe.composing.library import SkillLibrary
from kvprobe.errors import KvprobeError, ModelSourceError, UnsupportedError
from kvprobe.models import files
from kvprobe.models.files import settings_sha256, sha256_of
from kvprobe.models.loader import load_subject

SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"
EVIL = "raise SystemExit('code of a model folder was run')\n"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def identified(folder: Path, **settings: Any) -> dict[str, Any]:
    """All that a record says of the model in a folder but what it is called and where it lies."""
    told = vars(load_subject(str(folder), device="cpu", **settings).identity)
    return {key: value for key, value in told.items() if key not in ("name", "source")}


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | changes))

    return edit


def other_weights(folder: Path, name: str = SAFE) -> None:
    tensors = load_file(folder / SAFE)
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, folder / name, metadata={"format": "pt"})


def redirected(folder: Path) -> None:
    other_weights(folder, "other.safetensors")
    edit_json("config.json", transformers_weights="other.safetensors")(folder)


def redirected_configuration(folder: Path) -> None:
    """Another configuration for this version of the model library, as config.json may name one."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.5.0.0.json").write_text(json.dumps(content | {"rms_norm_eps": 0.1}))
    edit_json("config.json", configuration_files=["config.5.0.0.json"])(folder)


def shards_beside_one_file(folder: Path) -> None:
    """The library opens the one file; its index names other weights."""
    other_weights(folder, "shard.safetensors")
    names = load_file(folder / SAFE)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "shard.safetensors")}))


def adapter(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():
        # peft asks the model library for a property by its old name.
        warnings.simplefilter("ignore", FutureWarning)
        tuned = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(folder)


def blob_of_other_bytes(folder: Path) -> None:
    """A link into a blob store whose blob is not what it is called."""
    blob = folder / "blobs" / sha256_of(folder / SAFE)
    blob.parent.mkdir()
    other_weights(folder, f"blobs/{blob.name}")
    (folder / SAFE).unlink()
    (folder / SAFE).symlink_to(blob)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / SAFE), folder / "pytorch_model.bin")
    (folder / SAFE).unlink()


def distributed(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"a pickle")
    (folder / "__0_0.distcp").write_bytes(b"")


def own_code(folder: Path) -> None:
    (folder / "evil.py").write_text(EVIL)
    edit_json("config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})(folder)


def own_tokenizer_code(folder: Path) -> None:
    (folder / "evil.py").write_text(EVIL)
    edit_json("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})(folder)


def swapped_words(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["t9"], words["t10"] = words["t10"], words["t9"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def write_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": other_weights,
    "weights named by the configuration": redirected,
    "configuration named by the configuration": redirected_configuration,
    "index beside one file": shards_beside_one_file,
    "adapter": adapter,
    "blob": blob_of_other_bytes,
    "pickle": pickled,
    "distributed checkpoint": distributed,
    "RoPE base": edit_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    "RoPE scaling": edit_json("config.json", rope_parameters=YARN),
    "activation": edit_json("config.json", hidden_act="relu"),
    "own code": own_code,
    "own code of the tokenizer": own_tokenizer_code,
    "end tokens": edit_json("generation_config.json", eos_token_id=[2, 5]),
    "vocabulary": swapped_words,
    "end of text": edit_json("tokenizer_config.json", eos_token="t9"),
    "decoding": edit_json("tokenizer_config.json", clean_up_tokenization_spaces=True),
    "chat template": write_template,
}
REFUSED = {
    *("weights named by the configuration", "index beside one file", "adapter", "pickle", "distributed checkpoint"),
    "own code of the tokenizer",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "m"
    write_folder(folder)
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "m"))


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_folder_is_another_model_or_does_not_load(plain: Path, folder: Path, change: str) -> None:
    CHANGES[change](folder)
    if change in REFUSED:
        with pytest.raises(ModelSourceError, match=str(folder)):
            identified(folder)
    else:
        assert identified(folder) != identified(plain)


@given(data=st.data())
def test_models_of_one_identity_compute_the_same(plain: Path, data: st.DataObject) -> None:
    """For any key of the configuration and any value that the library takes."""
    settings = json.loads((plain / "config.json").read_text())
    key = data.draw(st.sampled_from(sorted({*settings, "attention_bias", "sliding_window", "head_dim", "unheard_of"})))
    value = data.draw(st.sampled_from([None, True, False, -1, 0, 0.5, 1, 2, 3, 4, 7, 1000.0, "relu", [], YARN]))
    changed = plain.with_name("changed")
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(plain, changed)
    edit_json("config.json", **{key: value})(changed)
    try:
        found = load_subject(str(changed), device="cpu", attention="eager")
    except KvprobeError:
        # Nonsense is refused in a sentence and never with a traceback.
        return
    known = load_subject(str(plain), device="cpu", attention="eager")
    if identified(changed) == identified(plain):
        ids = torch.tensor([known.tokenizer(TEXT).input_ids])
        assert found.tokenizer(TEXT).input_ids == ids[0].tolist()
        assert torch.equal(found.model(ids).logits, known.model(ids).logits)


def test_names_and_places_are_no_part_of_it(plain: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(plain, tmp_path / "another name"))
    (tmp_path / "link").symlink_to(moved)
    assert identified(plain) == identified(moved) == identified(tmp_path / "link")


def test_how_it_is_loaded_is_part_of_it(plain: Path) -> None:
    kinds = [{}, {"dtype": "bfloat16"}, {"attention": "eager"}]
    assert len({json.dumps(identified(plain, **kind)) for kind in kinds}) == len(kinds)


def test_an_adapter_beside_a_gguf_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelSourceError, match=r"holds the adapter adapter_config\.json.*merge"):
        load_subject(str(tmp_path / "tiny.gguf"), device="cpu")


@pytest.mark.parametrize("change", ["RoPE base", "end tokens", "vocabulary", "chat template"])
def test_a_pin_covers_settings(tmp_path: Path, change: str) -> None:
    write_organism(tmp_path / "m")
    edit_json("card.json", settings_sha256=settings_sha256(tmp_path / "m"))(tmp_path / "m")
    identified(tmp_path / "m")
    CHANGES[change](tmp_path / "m")
    with pytest.raises(ModelSourceError, match=r"configuration and tokenizer files of .* not the pinned"):
        identified(tmp_path / "m")


def test_the_digest_of_a_big_file_follows_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a change keeps size, place and time of modification."""
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_BIG_BYTES", 1)
    monkeypatch.setattr(files, "_SETTLED_SECONDS", -1)
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    before, first = file.stat(), sha256_of(file)
    monkeypatch.setattr(files, "_read_sha256", lambda path: pytest.fail("it was read again"))
    assert sha256_of(file) == first
    monkeypatch.undo()
    monkeypatch.setattr(files, "_BIG_BYTES", 1)
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "cache"))
    with file.open("r+b") as opened:
        opened.write(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sha256_of(file) != first
    # Fresh enough for another write at the same time of change, so nothing was kept.
    assert len(list((tmp_path / "cache").rglob("*"))) == 2


def test_chunks_and_skills_are_those_of_one_configuration(tmp_path: Path) -> None:
    def yarn(factor: float) -> Any:
        shape = tiny("llama").config.to_dict() | {"rope_parameters": {**YARN, "attention_factor": factor}}
        return build(LlamaConfig(**shape), "yarn")

    one, other, library = yarn(1.0), yarn(1.4), SkillLibrary(tmp_path)
    chunk = precompile(one, tokens(9), "none")
    library.save(one, "a", chunk)
    assert library.load(yarn(1.0), "a", verify=True).token_ids == chunk.token_ids
    with pytest.raises(UnsupportedError, match="configuration"):
        library.load(other, "a", verify=True)
    with pytest.raises(UnsupportedError, match="configuration"):
        chunk.check_model(other)
    with pytest.raises(KvprobeError, match="configuration"):
        library.save(other, "b", chunk)
