"""One way to load any model: a name, a folder, a GGUF file or a hub id."""

from __future__ import annotations

from typing import Any

import torch

from kvprobe.errors import ConfigError, NumericsError, UnsupportedError
from kvprobe.models.architectures.base import ArchitectureAdapter, architecture_of
from kvprobe.models.caching import check_fills_cache, first_pass
from kvprobe.models.catalogue import model_config
from kvprobe.models.config import ModelConfig
from kvprobe.models.files import Progress, no_progress
from kvprobe.models.identity import identify
from kvprobe.models.memory import check_memory, count_parameters, refuse_if_short
from kvprobe.models.output import widen_output
from kvprobe.models.sources.base import MODEL_SOURCES, Checkpoint, LoadSettings
from kvprobe.models.subject import Subject

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def load_subject(
    name_or_path: str,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attention: str | None = None,
    extrapolate: bool | None = None,
    progress: Progress = no_progress,
) -> Subject:
    """Load a model with its tokenizer and adapter, frozen and in eval mode.

    Args:
        name_or_path: a name of `kvprobe models list`, a folder, a `.gguf` file or a hub id; what is not on this
            machine is fetched.
        dtype: of the weights; by default what the model's YAML says for the device.
        device: by default `cuda` when there is one.
        attention: `sdpa` or `eager`; by default the first that is exact for the architecture.
        extrapolate: whether tokens may stand at positions beyond those the model has; by default what its YAML says.
        progress: told about downloads.

    Raises:
        UnknownNameError: no such model; with the nearest names.
        ModelSourceError: files are missing, damaged or not the pinned ones, or cannot be fetched.
        UnsupportedError: no adapter knows the architecture, or the kernel is not exact for it.
        OutOfMemoryError: it does not fit.
        NumericsError: it computes logits that are not finite.
    """
    config = model_config(name_or_path)
    source = MODEL_SOURCES.get(config.source)()
    place = _device(device)
    path = source.pull(config, progress)
    try:
        checkpoint = source.open(config, path)
        adapter = architecture_of(checkpoint.config)
    except UnsupportedError as error:
        raise UnsupportedError(f"{config.name} is refused: {error}") from error
    settings = LoadSettings(_dtype(config, dtype, place), place, _attention(config, adapter, attention))
    _check_fits(config, checkpoint, settings)
    model, tokenizer = source.load(config, path, settings)
    _settle_chat(config, tokenizer)
    if config.output_dtype:
        widen_output(model, DTYPES[config.output_dtype])
    model.requires_grad_(False).eval()
    adapter.settle(model)
    check_fills_cache(model)
    _check_finite(config, model)
    identity = identify(model, tokenizer, config.name, checkpoint.location, checkpoint.weights_sha256)
    return Subject(
        config.name, model, tokenizer, adapter, identity, config.extrapolate if extrapolate is None else extrapolate
    )


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"There is no device {device!r}; use 'cpu', 'cuda' or 'cuda:0'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"Device {str(place)!r} was asked for, and PyTorch sees no CUDA device; use 'cpu'.")
    return place


def _dtype(config: ModelConfig, wanted: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if isinstance(wanted, torch.dtype):
        return wanted
    name = wanted or (config.dtype.cuda if device.type == "cuda" else config.dtype.cpu)
    if name not in DTYPES:
        raise ConfigError(f"There is no dtype {name!r} for weights; use one of {', '.join(DTYPES)}.")
    chosen: torch.dtype = DTYPES[name]
    return chosen


def _attention(config: ModelConfig, adapter: ArchitectureAdapter, wanted: str | None) -> str:
    exact = adapter.attention_backends
    chosen = wanted or config.attention or exact[0]
    if chosen not in exact:
        raise UnsupportedError(
            f"Attention {chosen!r} is not exact for {config.name} ({type(adapter).__name__}), so it would change the "
            f"model; use {' or '.join(repr(name) for name in exact)}."
        )
    return chosen


def _check_fits(config: ModelConfig, checkpoint: Checkpoint, settings: LoadSettings) -> None:
    if getattr(checkpoint.config, "quantization_config", None) is not None and config.memory_gb is not None:
        refuse_if_short(config.name, config.memory_gb * 1e9, settings.device, "packed weights")
        return
    parameters = count_parameters(checkpoint.config)
    check_memory(config.name, parameters, settings.dtype, settings.device, checkpoint.copies)


def _check_finite(config: ModelConfig, model: Any) -> None:
    logits = first_pass(model, torch.arange(1, 5, device=model.device)[None]).logits
    if not bool(torch.isfinite(logits).all()):
        raise NumericsError(
            f"{config.name} computes logits that are not finite; load it in float32, or fetch its weights again."
        )


def _settle_chat(config: ModelConfig, tokenizer: Any) -> None:
    if config.chat is False:
        tokenizer.chat_template = None
    elif config.chat and not tokenizer.chat_template:
        raise ConfigError(f"The tokenizer of {config.name!r} has no chat template; write 'chat: false' in its YAML.")
