"""Where a number comes from: what determines a cell, and what else a record names."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import linecache
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvprobe
from kvprobe.tasks.pairs import Pair

CELL_FORMAT = 1
PACKAGES = ("torch", "transformers", "numpy")
# What only draws, judges or speaks cannot change a measured row; models enter by their identity.
_WITHOUT_INFLUENCE = (
    "cli/",
    "report/",
    "html/",
    "viewing.py",
    "stats/",
    "organisms/",
    "models/configs/",
    "auditing/",
    "doctor.py",
)
_SOURCES = {".py", ".yaml", ".yml"}


def cell_key(content: Mapping[str, Any]) -> str:
    """sha256 of everything that determines a cell."""
    text = json.dumps({"format": CELL_FORMAT, **content}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def identity_record(subject: Any) -> dict[str, Any]:
    """The subject's identity as plain values; what ships with kvprobe is told by its place in the package."""
    record = {key: _plain(value) for key, value in vars(subject.identity).items()}
    source, package = Path(str(record.get("source", ""))), Path(kvprobe.__file__).parent
    if source.is_relative_to(package):
        record["source"] = source.relative_to(package.parent).as_posix()
    return record


def pair_record(pair: Pair) -> dict[str, Any]:
    """What identifies an aligned pair: token hashes, field, answers and where it comes from."""
    return {
        "base": pair.base.token_hash,
        "donor": pair.donor.token_hash,
        "variants": {name: variant.token_hash for name, variant in pair.variants.items()},
        "field": [pair.field.start, pair.field.end],
        "answers": [pair.base_answer_id, pair.donor_answer_id],
        "scenario": _plain(dataclasses.asdict(pair.scenario)),
        "spans": {name: [span.start, span.end] for name, span in pair.base.spans.items()},
    }


def pair_id(pair: Pair) -> str:
    """Short name of a pair that is the same on every machine and in every run."""
    return hashlib.sha256(json.dumps(pair_record(pair), sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def source_hash() -> str:
    """sha256 over the package's source files that can influence a measured row.

    Not the commit: a commit that changes the documentation must not invalidate finished cells.
    """
    root = Path(kvprobe.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        relative = file.relative_to(root).as_posix()
        if file.suffix in _SOURCES and not relative.startswith(_WITHOUT_INFLUENCE):
            digest.update(f"{relative}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def plugin_hash(plugin: Any) -> str:
    """sha256 of the source that defines a plugin's class: its file, which may lie outside the package, or its cell.

    In a notebook nothing but the cell is hashed, so what a plugin calls belongs into the cell that defines it.
    """
    try:
        file = inspect.getsourcefile(type(plugin))
    except (TypeError, OSError):
        file = None
    if file and Path(file).exists():
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    cells = {member.__code__.co_filename for member in vars(type(plugin)).values() if inspect.isfunction(member)}
    source = "".join(line for cell in sorted(cells) for line in linecache.getlines(cell))
    return hashlib.sha256(source.encode()).hexdigest() if source else "unknown"


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of what computes: Python (major and minor), torch, transformers, numpy."""
    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


@functools.cache
def code_version() -> dict[str, Any]:
    """`commit` and `dirty` of the git checkout that holds the package (`None` without one), and its version."""
    package = Path(kvprobe.__file__).parent
    try:
        version = importlib.metadata.version("kvprobe")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    # An installed copy may lie inside somebody else's repository, whose commit would mean nothing.
    ours = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(package, "rev-parse", "HEAD") if ours else None
    changes = _git(package, "status", "--porcelain", ".") if commit else None
    return {"version": version, "commit": commit, "dirty": None if changes is None else bool(changes)}


def threads() -> int:
    """Threads torch computes with."""
    import torch

    return torch.get_num_threads()


def machine() -> dict[str, Any]:
    """What is told in the run log only: host, processor, process."""
    return {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count(), "process": os.getpid()}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
