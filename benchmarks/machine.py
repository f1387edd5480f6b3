"""What this machine can do at most, measured in the same run as everything else."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

_SIDE = 2048
_BYTES = 256 * 2**20
_PACKAGES = ("torch", "transformers", "transformer-lens", "nnsight")


@dataclass(frozen=True)
class Rates:
    """Rates of the machine.

    Attributes:
        flops: FLOPs per second of a float32 product of two large square matrices.
        memory: bytes read and written per second by a copy into memory that is there already.
    """

    flops: float
    memory: float


@functools.cache
def _operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    square = torch.ones(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
    line = torch.ones(_BYTES // 4), torch.ones(_BYTES // 4)
    return *square, *line


def measure_rates(repeats: int = 1) -> Rates:
    """The best of `repeats` measurements of each rate, of the CPU."""
    square, product, source, target = _operands()
    multiply = min(_seconds(lambda: torch.mm(square, square, out=product)) for _ in range(repeats))
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(repeats))
    return Rates(2 * _SIDE**3 / multiply, 2 * _BYTES / copy)


def median_rates(rates: list[Rates]) -> Rates:
    """The median of each rate."""
    return Rates(median(rate.flops for rate in rates), median(rate.memory for rate in rates))


def description() -> dict[str, Any]:
    """Processor, cores, threads, memory, versions and commit."""
    from kvprobe.runs.capacity import cores
    from kvprobe.runs.provenance import code_version

    return {
        "processor": _processor(),
        "system": platform.system(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "kvprobe": code_version(),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _seconds(run: Any) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
