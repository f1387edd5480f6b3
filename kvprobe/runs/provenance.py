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

from kvprobe.tasks.pairs import Pair

CELL_FORMAT = 1
ROOT = Path(__file__).parents[1]
"""Folder of the package."""
PACKAGES = ("torch", "transformers", "numpy")
# What only draws, judges or speaks cannot change a measured row; models enter by their identity.
_WITHOUT_INFLUENCE = (
    *("cli/", "report/", "html/", "figures/", "stats/", "organisms/", "auditing/", "configs/", "experiments/"),
    *("viewing.py", "doctor.py", "__init__.py", "__main__.py"),
)
_PROBES, _SHARED = "probes/", ("probes/base.py", "probes/gating.py", "probes/kit/")
_SOURCES = {".py", ".yaml", ".yml"}


def cell_key(content: Mapping[str, Any]) -> str:
    """sha256 of everything that determines a cell."""
    text = json.dumps({"format": CELL_FORMAT, **content}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def identity_record(subject: Any) -> dict[str, Any]:
    """The subject's identity as plain values; what ships with kvprobe is told by its place in the package."""
    record = {key: _plain(value) for key, value in vars(subject.identity).items()}
    source = Path(str(record.get("source", "")))
    if source.is_relative_to(ROOT):
        record["source"] = source.relative_to(ROOT.parent).as_posix()
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
    """sha256 over the package's source files that can influence a row of any probe.

    Not the commit: a commit that changes the documentation must not invalidate finished cells. Not the probes
    themselves: what a probe measures depends on its own folder alone (`plugin_hash`).
    """
    files = {file.relative_to(ROOT).as_posix(): file for file in ROOT.rglob("*") if file.suffix in _SOURCES}
    return _hash_of({name: file for name, file in files.items() if _influences_all(name)})


def _influences_all(name: str) -> bool:
    if name.startswith(_PROBES):
        return name.startswith(_SHARED) and not _only_reads(name)
    return not name.startswith(_WITHOUT_INFLUENCE)


def _only_reads(name: str) -> bool:
    """Whether a file of a probe turns rows into effects and figures, which measures nothing."""
    return name.endswith("/reading.py") or "/reading/" in name


def _hash_of(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def plugin_hash(plugin: Any) -> str:
    """sha256 of the source that a plugin's class measures by.

    Of one of kvprobe's own probes, its folder without its reading; of a plugin elsewhere, the file that defines its
    class; in a notebook, the cell, so what a plugin calls belongs into the cell that defines it.
    """
    try:
        file = inspect.getsourcefile(type(plugin))
    except (TypeError, OSError):
        file = None
    if file and Path(file).is_relative_to(ROOT / _PROBES) and Path(file).parent != ROOT / _PROBES:
        own = {f.relative_to(ROOT).as_posix(): f for f in Path(file).parent.rglob("*.py")}
        return _hash_of({name: f for name, f in own.items() if not _only_reads(name)})
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
    try:
        version = importlib.metadata.version("kvprobe")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    # An installed copy may lie inside somebody else's repository, whose commit would mean nothing.
    ours = _git(ROOT, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(ROOT, "rev-parse", "HEAD") if ours else None
    changes = _git(ROOT, "status", "--porcelain", ".") if commit else None
    return {"version": version, "commit": commit, "dirty": None if changes is None else bool(changes)}


def threads() -> int:
    """Threads torch computes with."""
    import torch

    return torch.get_num_threads()


def machine() -> dict[str, Any]:
    """What is told in the run log only."""
    return {"system": platform.platform(), "cores": os.cpu_count()}


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
