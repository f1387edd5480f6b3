"""A repository on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from typing_extensions import override

from kvprobe.errors import ModelSourceError
from kvprobe.models.config import ModelConfig
from kvprobe.models.files import Progress
from kvprobe.models.sources.base import MODEL_SOURCES, Checkpoint, first_line, quiet_library
from kvprobe.models.sources.directory import DirectorySource, read_json, weight_files

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_REACH_SECONDS = 10


@MODEL_SOURCES.register("hub")
class HubSource(DirectorySource):
    """A hub id: weights, configuration and tokenizer are fetched once, code never."""

    downloads: ClassVar[bool] = True
    mend = "pull it again, or correct the sha256 or revision in its YAML"

    @override
    def is_here(self, config: ModelConfig) -> bool:
        return _local_snapshot(config) is not None

    @override
    def pull(self, config: ModelConfig, progress: Progress) -> Path:
        local = _local_snapshot(config)
        if local is not None:
            return local
        _require_reachable(config)
        progress(f"download {config.hub_id}", 0.0)
        with quiet_library():
            try:
                path = _snapshot(config, allow_patterns=_FILES)
            except Exception as error:
                # The hub library raises its own, the HTTP library's and the operating system's errors.
                raise ModelSourceError(_explain(config, error)) from error
        progress(f"download {config.hub_id}", 1.0)
        return path

    @override
    def open(self, config: ModelConfig, path: Path) -> Checkpoint:
        checkpoint = super().open(config, path)
        return replace(checkpoint, location=f"{config.hub_id}@{path.name}")


def _snapshot(config: ModelConfig, **options: Any) -> Path:
    assert config.hub_id is not None
    return Path(huggingface_hub.snapshot_download(config.hub_id, revision=config.revision, **options))


def _local_snapshot(config: ModelConfig) -> Path | None:
    """The downloaded snapshot; None when it is absent or incomplete."""
    try:
        path = _snapshot(config, local_files_only=True)
        read_json(path / "config.json")
        weight_files(path)
    except (OSError, ValueError, ModelSourceError):
        return None
    return path


def _require_reachable(config: ModelConfig) -> None:
    """Ask the hub one question first: its library retries for half a minute and writes about each try.

    Raises:
        ModelSourceError: there is no connection, or downloads are switched off.
    """
    if constants.HF_HUB_OFFLINE:
        raise ModelSourceError(
            f"{config.hub_id} is not on this machine and HF_HUB_OFFLINE is set; unset it, or download the model "
            "elsewhere and load its folder by path."
        )
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=_REACH_SECONDS)
    except Exception as error:
        raise ModelSourceError(
            f"{config.hub_id} is not on this machine and {constants.ENDPOINT} cannot be reached ({first_line(error)}); "
            "connect to the network, or download the model elsewhere and load its folder by path."
        ) from error


def _explain(config: ModelConfig, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return (
            f"The hub gives {config.hub_id} only to those who accepted its licence; accept it on the model's page, "
            "then run `hf auth login`."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{config.hub_id} has no revision {config.revision!r}; correct it in the model's YAML."
    if isinstance(error, RepositoryNotFoundError):
        return f"The hub knows no model {config.hub_id!r}, or it is private; check the id, or run `hf auth login`."
    return f"{config.hub_id} could not be downloaded ({first_line(error)}); try again, finished files are kept."
