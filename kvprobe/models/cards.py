"""What can be said about models without loading them: the list, the card, the pull."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from kvprobe.models.catalogue import CARD, model_config, model_names, read_card
from kvprobe.models.config import ModelConfig, Tier
from kvprobe.models.files import Progress, no_progress
from kvprobe.models.sources.base import MODEL_SOURCES
from kvprobe.registry import KINDS, describe


@dataclass(frozen=True)
class ModelRow:
    """One line of the list of models.

    Attributes:
        available: loads without the network.
        supported: kvprobe has an adapter for its architecture; None when the architecture is not known yet.
        memory_gb: of its weights, in 1e9 bytes; an estimate.
    """

    name: str
    tier: str
    architecture: str
    available: bool
    supported: bool | None
    memory_gb: float | None
    description: str


def list_models(tiers: Iterable[str] | None = None) -> list[ModelRow]:
    """All models known by name, organisms first, paper models by family and size; of some tiers only, if told.

    Raises:
        ConfigError: a YAML file is wrong; names it.
    """
    wanted = None if tiers is None else set(tiers)
    configs = [model_config(name) for name in model_names()]
    order = get_args(Tier)
    kept = [config for config in configs if wanted is None or config.tier in wanted]

    def place(config: ModelConfig) -> tuple[int, str, float]:
        family = config.architecture if config.tier == "paper" else ""
        return order.index(config.tier), family, (config.memory_gb or 0) if family else 0

    return [_row(config) for config in sorted(kept, key=place)]


def pull_model(name: str, progress: Progress = no_progress) -> Path:
    """Fetch a model's files, verify them and return where they lie; at once when they are here.

    Raises:
        UnknownNameError, ModelSourceError, UnsupportedError, OutOfMemoryError: as `load_subject`.
    """
    config = model_config(name)
    source = MODEL_SOURCES.get(config.source)()
    path = source.pull(config, progress)
    source.open(config, path)
    return path


def model_card(name: str) -> dict[str, Any]:
    """Everything known about a model, most telling first; an organism's own card included.

    Raises:
        UnknownNameError: no such model; with the nearest names.
    """
    config = model_config(name)
    row = _row(config)
    card: dict[str, Any] = {
        "name": config.name,
        "tier": config.tier,
        "description": config.description,
        "architecture": config.architecture or "known once its files are here",
        "supported": _support(row),
        "available": "yes" if row.available else f"no; fetch it with `kvprobe models pull {config.name}`",
        "source": _origin(config),
        "licence": config.licence or "see its source",
        "dtype": f"{config.dtype.cpu} on cpu, {config.dtype.cuda} on cuda",
        "attention": config.attention or _default_attention(config),
        "memory_gb": config.memory_gb,
        "sha256": config.sha256 or "not pinned",
    }
    if config.chat is not False and config.chat_arguments:
        card["chat_arguments"] = config.chat_arguments
    if config.source == "organism" and config.path is not None:
        card.update({key: value for key, value in read_card(config.path / CARD).items() if key not in card})
        card["sha256"] = card.get("weights_sha256", card["sha256"])
    return {key: value for key, value in card.items() if value is not None}


def _row(config: ModelConfig) -> ModelRow:
    supported = config.architecture in describe(KINDS["ARCHITECTURES"]) if config.architecture else None
    here = MODEL_SOURCES.get(config.source)().is_here(config)
    return ModelRow(
        config.name, config.tier, config.architecture, here, supported, config.memory_gb, config.description
    )


def _support(row: ModelRow) -> str:
    if row.supported is None:
        return "known once its files are here"
    return "yes" if row.supported else f"not yet: no adapter for {row.architecture}, so loading it is refused"


def _default_attention(config: ModelConfig) -> str:
    from kvprobe.models.architectures.base import ARCHITECTURES

    if config.architecture in ARCHITECTURES.names():
        return ARCHITECTURES.get(config.architecture).attention_backends[0]
    return "the first that is exact for its architecture"


def _origin(config: ModelConfig) -> str:
    if config.wheels is not None:
        return "GGUF inside " + ", ".join(part.requirement for part in config.wheels)
    if config.hub_id is not None:
        return f"hub id {config.hub_id}" + (f" at {config.revision}" if config.revision else "")
    return f"{config.source} {config.path}"
