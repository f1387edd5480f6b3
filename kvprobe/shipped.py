"""Data that ships with kvprobe: the folders `configs` and `experiments`."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("configs", "experiments")
PACKAGE = Path(__file__).parent


def shipped_folder(name: str) -> Path:
    """One of `FOLDERS`: inside the package where kvprobe is installed, beside it in a checkout."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def existing_or_shipped(path: Path) -> Path:
    """`path` if it exists; else the file or folder of that name that ships with kvprobe, such as
    `experiments/section3/locality.yaml`; `path` again if there is none.
    """
    if path.exists() or path.is_absolute() or path.parts[:1] not in {(name,) for name in FOLDERS}:
        return path
    shipped = shipped_folder(path.parts[0]).joinpath(*path.parts[1:])
    return shipped if shipped.exists() else path
