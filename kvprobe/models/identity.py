"""What identifies a model: sha256 of everything that changes a logit or a token."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# How it was loaded and by which version; dtype and kernel are told beside the configuration.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "_from_model_config"}
_PLACES = {"name_or_path", "is_local", "local_files_only", "trust_remote_code", "gguf_file", "_commit_hash"}


@dataclass(frozen=True)
class ModelIdentity:
    """What a record says about the model that produced it.

    Attributes:
        name, source: what it is called and where it lies, which change nothing.
        weights_sha256: of the weight files as the loader opens them, or of the values of a model made in memory.
        config_sha256: of the whole configuration as loaded, defaults included.
        generation_sha256: of the generation configuration as loaded.
        tokenizer_sha256: of the tokenizer as loaded, its chat template included.
        dtype, attention, device: how it computes.
        parameters: how many.
    """

    name: str
    source: str
    architecture: str
    weights_sha256: str
    config_sha256: str
    generation_sha256: str
    tokenizer_sha256: str
    dtype: str
    attention: str
    device: str
    parameters: int

    @property
    def fingerprint(self) -> str:
        """sha256 of what decides keys, values and logits: weights, configuration and dtype.

        The attention kernel and the device change them by no more than rounding.
        """
        return hashlib.sha256(f"{self.weights_sha256} {self.config_sha256} {self.dtype}".encode()).hexdigest()


def identify(model: Any, tokenizer: Any, name: str, source: str, weights_sha256: str | None = None) -> ModelIdentity:
    """The identity of a loaded Hugging Face model and its tokenizer, which may be None.

    `weights_sha256` is that of its files; None for a model made in memory, whose values are hashed.
    """
    return ModelIdentity(
        name=name,
        source=source,
        architecture=model.config.model_type,
        weights_sha256=weights_sha256 or state_sha256(model),
        config_sha256=_sha256_of_settings(model.config),
        generation_sha256=_sha256_of_settings(model.generation_config),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=model.config._attn_implementation,
        device=str(model.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def state_sha256(model: Any) -> str:
    """sha256 of all parameters and buffers: equal exactly when two states of a model are bit-equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted((*model.named_parameters(), *model.named_buffers()), key=lambda named: named[0]):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """sha256 of all that decides how text becomes tokens and back: vocabulary, rules, settings and chat template."""
    if tokenizer is None:
        return hashlib.sha256(b"").hexdigest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else _vocabulary_of(tokenizer)
    settings = {
        key: str(value)
        for key, value in tokenizer.init_kwargs.items()
        if key not in _PLACES and not key.endswith("_file")
    }
    told = [type(tokenizer).__name__, rules, settings, tokenizer.special_tokens_map, tokenizer.chat_template]
    return _sha256_of(told)


def _vocabulary_of(tokenizer: Any) -> list[str]:
    """sha256 of each file of a tokenizer in Python; a SentencePiece vocabulary has scores beside its words."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(file) for file in tokenizer.save_vocabulary(folder)]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _sha256_of_settings(settings: Any) -> str:
    return _sha256_of(_without_incidentals(settings.to_dict()) if settings is not None else None)


def _without_incidentals(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_incidentals(item) for key, item in value.items() if key not in _INCIDENTAL}
    if isinstance(value, list | tuple):
        return [_without_incidentals(item) for item in value]
    return value


def _sha256_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
