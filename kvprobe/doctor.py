"""What may go wrong on this machine, looked for before it does: small checks, one finding each."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_GROUPS = "kvprobe."
_SPARE_BYTES = 5e9
_TOLERANCE = 1e-4
EXTRAS = {
    "ray": ("distributed", "--executor ray"),
    "vllm": ("serving", "the serving benchmark"),
    "torchao": ("quantised", "weights in 8 or 4 bits"),
}
"""Packages that not everybody needs, each with its extra and with what it is for."""


class Mark(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """It works, and slower or with less than it could."""
    PROBLEM = "problem"
    """Something is broken."""


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it; `mend` is empty where nothing need be done."""

    mark: Mark
    text: str
    mend: str = ""


@dataclass(frozen=True)
class Place:
    """What is checked beside the machine: the folder of all results."""

    results: Path


Check = Callable[[Place], Finding]
CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they are told."""


def check(name: str) -> Callable[[Check], Check]:
    """Decorator that adds a check."""

    def file(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return file


def examine(results: Path) -> Iterator[tuple[str, Finding]]:
    """Every check's name with its finding; one that breaks is a problem itself."""
    for name, function in CHECKS.items():
        try:
            yield name, function(Place(results))
        except Exception as error:
            text = f"cannot be checked ({type(error).__name__}: {' '.join(str(error).split())})"
            yield name, Finding(Mark.PROBLEM, text, "reinstall kvprobe, or report this line")


def _judged(text: str, mend: str, *, bad: bool, mark: Mark = Mark.NOTE) -> Finding:
    return Finding(mark, text, mend) if bad else Finding(Mark.OK, text)


@check("versions")
def _versions(place: Place) -> Finding:
    wanted, named = _requirements(), ("torch", "transformers", "transformer-lens", "sae-lens")
    have = {name: _version(name) for name in wanted}
    wrong = [name for name, allowed in wanted.items() if not _within(have[name], allowed)]
    told = ", ".join(f"{name} {have.get(name) or 'absent'}" for name in dict.fromkeys([*named, *wrong]))
    mend = "pip install " + " ".join(f"'{name}{wanted[name]}'" for name in wrong)
    return _judged(f"Python {_python()}, {told}", mend, bad=bool(wrong), mark=Mark.PROBLEM)


@check("cache in transformers")
def _bridge(place: Place) -> Finding:
    version = _version("transformers") or "0"
    text = f"transformers {version} fills the KV cache of a model bridged by TransformerLens"
    broken = f"from transformers 5.24 on (here {version}) a model bridged by TransformerLens 3.9 drops its KV cache"
    bad = not _within(version, "<5.24")
    return _judged(broken if bad else text, "pip install 'transformers>=5.23,<5.24'", bad=bad, mark=Mark.PROBLEM)


@check("threads")
def _threads(place: Place) -> Finding:
    import torch

    threads, limit = torch.get_num_threads(), usable_cores()
    told = f"torch computes with {threads} threads on {limit:g} usable cores"
    if threads > limit:
        return Finding(Mark.NOTE, f"{told}, which wait for each other", f"export OMP_NUM_THREADS={max(1, int(limit))}")
    few = threads < limit // 2
    return _judged(told, f"unset OMP_NUM_THREADS, or set it to {int(limit)}", bad=few)


@check("BLAS")
def _blas(place: Place) -> Finding:
    from threadpoolctl import threadpool_info

    pools = {pool["internal_api"]: pool["num_threads"] for pool in threadpool_info()}
    limit = max(1, int(usable_cores()))
    told = ", ".join(f"{name} {threads}" for name, threads in sorted(pools.items())) or "none loaded"
    mend = f"export OMP_NUM_THREADS={limit} OPENBLAS_NUM_THREADS={limit} MKL_NUM_THREADS={limit}"
    return _judged(f"threads of libraries: {told}", mend, bad=any(threads > limit for threads in pools.values()))


@check("load")
def _load(place: Place) -> Finding:
    load, limit = os.getloadavg()[0], usable_cores()
    mend = "end other work before measuring times, or run with --jobs 1"
    return _judged(f"{load:.1f} processes want {limit:g} cores", mend, bad=load > 1.5 * limit)


@check("bfloat16")
def _bfloat16(place: Place) -> Finding:
    ratio = bfloat16_speed()
    flags = ", ".join(sorted(_processor_flags() & {"amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16"})) or "none"
    told = f"on the CPU {ratio:.1f} times the matrix-product speed of float32 (flags: {flags})"
    return _judged(told, "keep 'dtype: {cpu: float32}' in the YAML of models that run on this CPU", bad=ratio < 1.0)


@check("attention")
def _attention(place: Place) -> Finding:
    difference = attention_difference()
    mend = "write 'attention: eager' in the models' YAML, or install another build of torch"
    told = f"SDPA and eager differ by {difference:.0e} in float32"
    return _judged(told, mend, bad=not difference <= _TOLERANCE, mark=Mark.PROBLEM)


@check("memory")
def _memory(place: Place) -> Finding:
    import torch

    from kvprobe.models.memory import available_bytes
    from kvprobe.runs.capacity import PROCESS_BYTES

    free = available_bytes(torch.device("cpu"))
    if free is None:
        return Finding(Mark.NOTE, "the system does not tell what is free", "choose --jobs by hand")
    return _judged(f"{free / 1e9:.1f} GB free", "end other programs, or raise the limit", bad=free < 2 * PROCESS_BYTES)


@check("GPU")
def _gpu(place: Place) -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding(Mark.OK, f"CUDA {torch.version.cuda}: {'; '.join(_devices())}")
    if shutil.which("nvidia-smi"):
        build = f"torch {torch.__version__} (CUDA: {torch.version.cuda or 'not built in'})"
        return Finding(
            Mark.NOTE,
            f"{build} sees no GPU, though there is a driver",
            "install a CUDA build of torch that fits the driver",
        )
    if torch.backends.mps.is_available():
        return Finding(Mark.NOTE, "MPS is there and is not used", "nothing: kvprobe computes on CPU or CUDA")
    return Finding(Mark.OK, "none; models run on the CPU")


@check("hub cache")
def _hub(place: Place) -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    return _folder(Path(HF_HUB_CACHE), "set HF_HUB_CACHE to a folder of your own")


@check("model cache")
def _cache(place: Place) -> Finding:
    from kvprobe.models.files import cache_folder

    return _folder(cache_folder(), "set KVPROBE_CACHE to a folder of your own")


@check("results folder")
def _results(place: Place) -> Finding:
    return _folder(place.results, "give a folder of your own with --results")


@check("disk")
def _disk(place: Place) -> Finding:
    free = shutil.disk_usage(_existing(place.results)).free
    told = f"{free / 1e9:.1f} GB free where results go"
    return _judged(told, "free some, or give another disk with --results", bad=free < _SPARE_BYTES)


@check("hub access")
def _offline(place: Place) -> Finding:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    told = "HF_HUB_OFFLINE is set: paper models load only if they are in the hub cache"
    mend = "unset HF_HUB_OFFLINE to fetch them"
    return _judged(told if HF_HUB_OFFLINE else "not switched off", mend, bad=HF_HUB_OFFLINE)


def _extra(package: str) -> Check:
    def look(place: Place) -> Finding:
        extra, purpose = EXTRAS[package]
        version = _version(package)
        told = f"{version}, for {purpose}" if version else f"not installed, so {purpose} is not there"
        return _judged(told, f"pip install 'kvprobe[{extra}]', if you want it", bad=version is None)

    return look


CHECKS.update({package: _extra(package) for package in EXTRAS})


@check("plugins")
def _plugins(place: Place) -> Finding:
    groups = [group for group in importlib.metadata.entry_points().groups if group.startswith(_GROUPS)]
    points = [point for group in groups for point in importlib.metadata.entry_points(group=group)]
    broken = {_owner(point): reason for point in points if (reason := _breaks(point))}
    told = "; ".join(f"{name} cannot be loaded ({reason})" for name, reason in broken.items())
    mend = " and ".join(f"pip uninstall {name}" for name in broken) + ", or upgrade it"
    return _judged(told or f"{len(points)} of third parties", mend, bad=bool(broken), mark=Mark.PROBLEM)


def usable_cores(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores this process may use, by its affinity and by the limit of its control group."""
    from kvprobe.runs.capacity import cores

    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return float(cores()) if quota == "max" else min(float(cores()), int(quota) / int(period))
    except (OSError, ValueError):
        return float(cores())


def bfloat16_speed(size: int = 256, repeats: int = 20) -> float:
    """How many times faster a matrix product is on one core in bfloat16 than in float32, by the best of a few."""
    import torch

    from kvprobe.runs.capacity import limited_threads

    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(size, size, generator=generator)
    seconds = []
    with limited_threads(1):  # several wait for each other on a machine that is busy
        for matrix in (factor, factor.to(torch.bfloat16)):
            taken = []
            for _ in range(repeats):
                began = time.perf_counter()
                torch.mm(matrix, matrix)
                taken.append(time.perf_counter() - began)
            seconds.append(min(taken))
    return seconds[0] / seconds[1]


def attention_difference() -> float:
    """Largest difference of torch's fused attention to the plain formula, on a small masked example in float32."""
    import torch

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 33, 16, generator=generator) for _ in range(3))
    mask = torch.full((33, 33), float("-inf")).triu(1)
    fused = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    plain = torch.softmax(query @ key.transpose(-1, -2) / 4.0 + mask, -1) @ value
    return float((fused - plain).abs().max())


def _requirements() -> Mapping[str, str]:
    """Kvprobe's own dependencies with the versions it allows."""
    from packaging.requirements import Requirement

    parsed = [Requirement(line) for line in importlib.metadata.requires("kvprobe") or []]
    return {one.name: str(one.specifier) for one in parsed if one.marker is None or "extra" not in str(one.marker)}


def _within(version: str | None, allowed: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return version is not None and SpecifierSet(allowed).contains(version, prereleases=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> str:
    import platform

    return platform.python_version()


def _processor_flags(file: Path = Path("/proc/cpuinfo")) -> set[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":")[1].split()}


def _devices() -> Iterator[str]:
    import torch

    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        yield f"{torch.cuda.get_device_name(number)} with {free / 1e9:.0f} of {total / 1e9:.0f} GB free"


def _folder(folder: Path, mend: str) -> Finding:
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return Finding(Mark.OK, f"{folder} can be written")
    except OSError as error:
        return Finding(Mark.PROBLEM, f"{folder} cannot be written ({error.strerror})", mend)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there already."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def _owner(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _breaks(point: importlib.metadata.EntryPoint) -> str:
    try:
        point.load()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""
