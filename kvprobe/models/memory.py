"""Does a model fit before it is loaded?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from kvprobe.errors import ModelSourceError, OutOfMemoryError

_RESERVE = 1.1
"""Weights and a little room for activations and a cache."""


def check_memory(name: str, parameters: int, dtype: torch.dtype, device: torch.device, copies: float = 1.0) -> None:
    """Refuse a model that does not fit.

    Args:
        name: for the message.
        parameters: number of weights, tied ones counted once.
        dtype: they are loaded in.
        device: they are loaded to.
        copies: how often the weights lie in memory while they are read.

    Raises:
        OutOfMemoryError: says how much is needed and free.
    """
    needed = parameters * dtype.itemsize
    refuse_if_short(name, needed * _RESERVE * copies, device, f"weights in {str(dtype).removeprefix('torch.')}")


def refuse_if_short(name: str, needed_bytes: float, device: torch.device, what: str) -> None:
    """Compare with what is free now; see `check_memory`."""
    free = available_bytes(device)
    if free is not None and needed_bytes > free:
        raise OutOfMemoryError(
            f"{name} needs about {needed_bytes / 1e9:.2f} GB for its {what}, and {device} has {free / 1e9:.2f} GB "
            "free; choose a smaller model, a smaller dtype or another device."
        )


def count_parameters(config: Any) -> int:
    """Number of weights of the model with this configuration, without allocating them.

    Raises:
        ModelSourceError: no model can be built of it.
    """
    import transformers

    from kvprobe.models.architectures.base import architecture_of

    auto_class = getattr(transformers, architecture_of(config).auto_class)
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config)
    except Exception as error:
        # The library computes with what it reads: any error of Python's tells of a wrong value.
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        kind = f"{type(error).__name__}: " if isinstance(error, KeyError | AttributeError) else ""
        raise ModelSourceError(
            f"No model can be built of this configuration of type {config.model_type!r} ({kind}{reason}); "
            "correct its config.json."
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def available_bytes(device: torch.device) -> int | None:
    """Free bytes on a device; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [value for value in (_linux_available(), _control_group_available()) if value is not None]
    return min(known) if known else _posix_available()


def _linux_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    # The figure counts page cache as free, which `SC_AVPHYS_PAGES` does not.
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _control_group_available(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))


def _posix_available() -> int | None:
    for key in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if key in getattr(os, "sysconf_names", {}):
            return os.sysconf(key) * os.sysconf("SC_PAGE_SIZE")
    return None
