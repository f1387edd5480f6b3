"""Data that ships with kvprobe: the folders `configs` and `experiments`."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("configs", "experiments")
_PACKAGE = Path(__file__).parent


def shipped_folder(name: str) -> Path:
    """One of `FOLDERS`: inside the package where kvprobe is installed, beside it in a checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def shipped(path: Path) -> Path | None:
    """What ships under a relative path such as `configs/defaults.yaml`; `None` if nothing does."""
    if path.parts[:1] not in [(name,) for name in FOLDERS]:
        return None
    found = shipped_folder(path.parts[0]).joinpath(*path.parts[1:])
    return found if found.exists() else None
