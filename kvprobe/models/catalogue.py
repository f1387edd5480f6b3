"""Which models are known by name, and what any other name or path stands for."""

from __future__ import annotations

import json
import re
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from kvprobe.errors import ConfigError, ModelSourceError, UnknownNameError
from kvprobe.models.config import DtypeByDevice, ModelConfig, read_model_config
from kvprobe.shipped import shipped_folder

USER_FOLDER = Path("configs") / "models"
"""Looked for in the working directory: every YAML in it makes one more model known."""

CARD = "card.json"


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
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _folder_config(path)
    if path.is_file():
        return _file_config(path)
    if path.suffix == ".gguf" or name_or_path.startswith(("/", "./", "../", "~")):
        raise ModelSourceError(f"There is no file or folder {path}; correct the path to the model.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path):
        half = DtypeByDevice(cpu="float32", cuda="bfloat16")
        return ModelConfig(name=name_or_path, tier="paper", source="hub", hub_id=name_or_path, dtype=half)
    raise UnknownNameError("model", name_or_path, [*organisms, *configs])


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
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{file} is cut short or is no JSON ({error}); reinstall or train it again.") from error
    if not isinstance(content, dict):
        raise ModelSourceError(f"{file} must hold a JSON object; reinstall or train it again.")
    return content


def _file_config(path: Path) -> ModelConfig:
    if path.suffix != ".gguf":
        raise ModelSourceError(f"{path} is no .gguf file; name a folder in the Hugging Face layout or a GGUF file.")
    name = path.stem.replace(" ", "-")
    return ModelConfig(name=name, tier="local", source="gguf", path=path)
