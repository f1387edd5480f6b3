"""YAML files of models and what names stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from models_files import write_folder, write_organism

from kvprobe.errors import ConfigError, ModelSourceError, UnknownNameError
from kvprobe.models import catalogue
from kvprobe.models.catalogue import config_files, model_config, model_names
from kvprobe.models.config import read_model_config
from kvprobe.models.sources.base import MODEL_SOURCES

HUB = {"tier": "paper", "source": "hub", "hub_id": "someone/model"}


def write_yaml(folder: Path, name: str, /, **content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", sorted(config_files()))
def test_shipped_yaml_is_complete(name: str) -> None:
    config = model_config(name)
    assert config.source in MODEL_SOURCES.names()
    assert config.tier in ("micro", "pocket", "paper")
    assert config.architecture
    assert config.description.endswith(".")
    assert config.licence
    assert config.memory_gb
    assert config.sha256 or config.tier in ("micro", "paper")
    if config.tier == "paper":
        assert config.dtype.cuda == "bfloat16"
    if config.architecture == "gemma2":
        assert config.attention == "eager"
    if name.startswith("qwen3-") and "vl" not in name:
        assert config.chat_arguments == {"enable_thinking": False}


def test_one_yaml_in_the_working_directory_makes_a_model_known(home: Path) -> None:
    file = write_yaml(home / "configs" / "models", "mine", tier="local", source="directory", path="weights")
    assert "mine" in model_names()
    assert model_config("mine").path == Path("configs/models/weights")
    assert read_model_config(file).path == file.parent / "weights"


def test_the_name_of_a_shipped_model_cannot_be_taken(home: Path) -> None:
    write_yaml(home / "configs" / "models", "smollm2-135m", **HUB)
    with pytest.raises(ConfigError, match=r"name the same model; rename"):
        model_names()


def test_the_name_of_an_organism_cannot_be_taken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "organism_folder", lambda: home / "shipped")
    write_organism(home / "shipped" / "fly")
    write_yaml(home / "configs" / "models", "fly", **HUB)
    with pytest.raises(ConfigError, match=r"takes the name of an organism"):
        model_config("fly")


def test_a_broken_yaml_spoils_only_its_own_model(home: Path) -> None:
    write_yaml(home / "configs" / "models", "broken", nonsense=1)
    assert model_config("qwen3-8b").hub_id == "Qwen/Qwen3-8B"
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        model_config("broken")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**HUB, "colour": "red"}, r"key 'colour' of .*m\.yaml: Extra inputs"),
        ({**HUB, "memory_gb": "much"}, r"key 'memory_gb' of .*m\.yaml"),
        ({**HUB, "dtype": {"cuda": "int8"}}, r"key 'dtype\.cuda'"),
        ({**HUB, "sha256": "12"}, r"key 'sha256'"),
        ({**HUB, "name": "other"}, r"names its model 'other'"),
        ({"tier": "paper", "source": "hub"}, r"m\.yaml: source 'hub' needs the key 'hub_id'"),
        ({"tier": "pocket", "source": "gguf", "path": "x.gguf"}, r"needs the key 'sha256'"),
        ({"tier": "pocket", "source": "wheel_gguf", "file": "a.gguf"}, r"needs the key 'wheels'"),
        ({**HUB, "wheels": [{"requirement": "open-ended", "member": "x"}]}, r"key 'wheels\.0\.requirement'"),
        ({**HUB, "file": "../../escape.gguf"}, r"key 'file'"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config(write_yaml(tmp_path, "m", **content))


@pytest.mark.parametrize("text", ["- a list\n", "a: [1\n", "", "1: 2\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"m\.yaml"):
        read_model_config(file)


def test_an_unknown_name_gets_the_nearest(home: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"no model named 'qwen3-8bb'; did you mean 'qwen3-8b'"):
        model_config("qwen3-8bb")


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "nothing.gguf", "~/no-such-model"])
def test_a_path_that_does_not_exist_is_named(home: Path, path: str) -> None:
    with pytest.raises(ModelSourceError, match=r"There is no file or folder"):
        model_config(path)


def test_a_file_of_another_kind_is_refused(home: Path) -> None:
    (home / "model.bin").write_bytes(b"")
    with pytest.raises(ModelSourceError, match=r"model\.bin is no \.gguf file"):
        model_config(str(home / "model.bin"))


def test_what_a_name_stands_for(home: Path) -> None:
    write_folder(home / "folder")
    write_organism(home / "mine")
    (home / "file.gguf").write_bytes(b"")
    assert model_config("folder").source == "directory"
    assert (model_config("./mine").source, model_config("./mine").tier) == ("organism", "local")
    assert model_config("file.gguf").source == "gguf"
    assert model_config("someone/thing").hub_id == "someone/thing"


def test_shipped_organisms_are_found_by_their_cards(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "organism_folder", lambda: home / "shipped")
    assert not [name for name in model_names() if name == "fly"]
    write_organism(home / "shipped" / "fly")
    (home / "shipped" / "unfinished").mkdir()
    assert model_names()[0] == "fly"
    assert "unfinished" not in model_names()
    assert model_config("fly").tier == "organism"
    assert model_config("fly").description == "a test organism"
