"""Which models are known by name, and what any other name or path stands for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from kvprobe.errors import ConfigError, KvprobeError, ModelSourceError, UnknownNameError
from kvprobe.models.config import DtypeByDevice, ModelConfig, Tier, read_model_config
from kvprobe.shipped import shipped_folder

USER_FOLDER = Path("configs") / "models"
"""Looked for in the working directory: every YAML in it makes one more model known."""

CARD = "card.json"


_PAPER_MODELS = {
    "qwen2": "qwen2.5-7b-instruct",
    "qwen3": "qwen3-8b",
    "llama": "llama-3.1-8b-instruct",
    "gemma2": "gemma-2-9b-it",
    "gemma3": "gemma-3-27b-it",
    "gemma3_text": "gemma-3-27b-it",
    "mistral": "mistral-7b-instruct-v0.3",
    "qwen2_5_vl": "qwen2.5-vl-7b-instruct",
    "qwen3_vl": "qwen3-vl-8b-instruct",
}


def organism_folder() -> Path:
    """Where the organisms that ship with kvprobe lie, one folder each."""
    return Path(str(package_files("kvprobe.organisms"))) / "weights"


def config_files() -> dict[str, Path]:
    """The YAML file of each model that has one: those of kvprobe, then the user's.

    Raises:
        ConfigError: a file of the user's takes the name of another model.
    """
    found = {file.stem: file for file in sorted((shipped_folder("configs") / "models").glob("*.yaml"))}
    for file in sorted(USER_FOLDER.glob("*.yaml")):
        other = found.setdefault(file.stem, file)
        # In a checkout of kvprobe both folders hold the same files.
        if other.read_bytes() != file.read_bytes():
            raise ConfigError(f"{file} and {other} name the same model; rename one of them.")
    return found


def organism_names() -> list[str]:
    """The organisms that ship: folders with a card."""
    folder = organism_folder()
    return sorted(card.parent.name for card in folder.glob(f"*/{CARD}")) if folder.is_dir() else []


def model_names() -> list[str]:
    """All names `load_subject` knows, organisms first."""
    return [*organism_names(), *config_files()]


def model_config(name_or_path: str) -> ModelConfig:
    """What a name, a folder, a GGUF file or a hub id stands for.

    Raises:
        UnknownNameError: none of these; with the nearest names.
        ModelSourceError: a path that does not exist.
        ConfigError: the model's YAML file is wrong.
    """
    organisms, configs = organism_names(), config_files()
    if name_or_path in configs and name_or_path in organisms:
        raise ConfigError(f"{configs[name_or_path]} takes the name of an organism that ships with kvprobe; rename it.")
    if name_or_path in configs:
        return read_model_config(configs[name_or_path])
    if name_or_path in organisms:
        return _folder_config(organism_folder() / name_or_path)
    try:
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            return _folder_config(path)
        if path.is_file():
            return _file_config(path)
    except (OSError, RuntimeError) as error:
        # A name longer than any file's, or the folder of a user who is not known here.
        raise ModelSourceError(
            f"{name_or_path} cannot be looked up ({error}); correct the path to the model."
        ) from error
    if path.suffix == ".gguf" or name_or_path.startswith(("/", "./", "../", "~")):
        raise ModelSourceError(f"There is no file or folder {path}; correct the path to the model.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path):
        half = DtypeByDevice(cpu="float32", cuda="bfloat16")
        return ModelConfig(name=name_or_path, tier="paper", source="hub", hub_id=name_or_path, dtype=half)
    raise UnknownNameError("model", name_or_path, [*organisms, *configs])


@dataclass(frozen=True)
class Standing:
    """What a model's results may say about the paper.

    Args:
        tier: see `ModelConfig`; `paper` for the paper's own models alone, `None` for one that is not known here.
        paper_model: the paper's model that it is or, for want of that, its main model of the same architecture.
    """

    tier: Tier | None = None
    paper_model: str | None = None


def standing(name_or_path: str) -> Standing:
    """A model's tier and the paper's model beside it; a model that is not known here has neither."""
    try:
        config = model_config(name_or_path)
    except KvprobeError:
        return Standing()
    if config.source == "organism":
        # One that a user has trained is no pretrained model either.
        return Standing("organism", config.paper_model or paper_model_of(config.architecture))
    if config.tier == "paper":
        return Standing("paper", config.name) if config.name in config_files() else _named_on_the_hub(config)
    if config.tier == "micro":
        return Standing("micro", config.paper_model)
    return Standing(config.tier, config.paper_model or paper_model_of(config.architecture))


def paper_model_of(architecture: str) -> str | None:
    """The paper's main model of a Hugging Face `model_type`."""
    return _PAPER_MODELS.get(architecture)


def _named_on_the_hub(config: ModelConfig) -> Standing:
    """A hub id is the paper's model where its YAML names it; any other is a pretrained model."""
    for name, file in config_files().items():
        named = read_model_config(file)
        if named.hub_id == config.hub_id and named.tier == "paper":
            return Standing("paper", name)
    return Standing("local", config.paper_model)


def _folder_config(path: Path) -> ModelConfig:
    name = path.resolve().name.replace(" ", "-")
    if (path / CARD).is_file():
        card = read_card(path / CARD)
        shipped = path.parent == organism_folder()
        return ModelConfig(
            name=name,
            tier="organism" if shipped else "local",
            source="organism",
            path=path,
            architecture=str(card.get("architecture", "")),
            description=str(card.get("description", "")),
            licence=str(card.get("licence", "")),
        )
    half = DtypeByDevice(cpu="float32", cuda="bfloat16")
    return ModelConfig(name=name, tier="local", source="directory", path=path, dtype=half)


def read_card(file: Path) -> dict[str, Any]:
    """An organism's card.

    Raises:
        ModelSourceError: the file is damaged.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelSourceError(f"{file} is cut short or is no JSON ({error}); reinstall or train it again.") from error
    if not isinstance(content, dict):
        raise ModelSourceError(f"{file} must hold a JSON object; reinstall or train it again.")
    return content


def _file_config(path: Path) -> ModelConfig:
    if path.suffix != ".gguf":
        raise ModelSourceError(f"{path} is no .gguf file; name a folder in the Hugging Face layout or a GGUF file.")
    name = path.stem.replace(" ", "-")
    return ModelConfig(name=name, tier="local", source="gguf", path=path)
