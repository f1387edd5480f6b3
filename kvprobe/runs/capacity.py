"""How much of this machine an experiment may use at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvprobe.errors import KvprobeError
from kvprobe.models.catalogue import model_config
from kvprobe.models.memory import available_bytes

PROCESS_BYTES = 1.5e9
"""What a process takes beside the weights: the libraries, caches and activations of a small model."""


def possible_jobs(models: Sequence[str]) -> int:
    """Processes that can measure at once: as many as there are cores, models, and room for the largest of them.

    One where there is a CUDA device, which processes would have to share.

    Args:
        models: of all experiments; one that is in several counts in each.
    """
    import torch

    if torch.cuda.is_available():
        return 1
    free = available_bytes(torch.device("cpu"))
    largest = max((weight_bytes(name) for name in set(models)), default=0.0)
    fitting = len(models) if free is None else int(free // (PROCESS_BYTES + largest))
    return max(1, min(cores(), len(models), fitting))


def threads_of_each(jobs: int) -> int:
    """Threads for each of so many processes: their share of the cores, and no more than torch has been set to."""
    import torch

    return max(1, min(torch.get_num_threads(), cores() // jobs))


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def weight_bytes(model: str) -> float:
    """What a model takes while it is loaded on a CPU, in float32; 0 where nothing is known before."""
    try:
        config = model_config(model)
    except KvprobeError:
        # A model that is not there is told of when its turn comes.
        return 0.0
    if config.memory_gb is not None:
        return config.memory_gb * 2e9
    if config.path is None or not config.path.exists():
        return 0.0
    files = [config.path] if config.path.is_file() else config.path.glob("*.safetensors")
    return 2.0 * sum(file.stat().st_size for file in files)


def limit_threads(threads: int) -> Any:
    """Compute with so many threads from now on, in torch and in the libraries below numpy and scipy.

    Returns:
        threadpoolctl's handle on the latter.
    """
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    return threadpool_limits(threads)


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Compute with so many threads inside the block."""
    import torch

    before = torch.get_num_threads()
    try:
        with limit_threads(threads):
            yield
    finally:
        torch.set_num_threads(before)
