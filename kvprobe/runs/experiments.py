"""Experiments by name: those that ship with kvprobe and those of the working directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvprobe.errors import ConfigError, UnknownNameError
from kvprobe.shipped import shipped

FOLDER = Path("experiments")
"""Looked for in the working directory, and shipped with kvprobe."""
_YAML = {".yaml", ".yml"}


def known_experiments() -> dict[str, Path]:
    """Experiment files by name; one in the working directory's `experiments` hides a shipped one of the same name.

    A shipped file is given as `experiments/...` wherever kvprobe is installed; `located` finds it.
    """
    return {file.stem: file for folder in (shipped(FOLDER), FOLDER) if folder for file in _in_folder(folder, FOLDER)}


def experiment_files(words: Sequence[str]) -> list[Path]:
    """The experiment files that paths, folders, sections (`section3` or `3`) and names (`locality`) stand for.

    A word that is a known name or section is taken as such; write `./NAME` for a folder that is called the same.

    Raises:
        ConfigError: a file does not exist, or a folder holds no experiment.
        UnknownNameError: a word is none of these; with the nearest names.
    """
    known = known_experiments()
    return list(dict.fromkeys(file for word in words for file in _files_of(word, known)))


def experiment_file(path_or_name: str | Path) -> Path:
    """The one file that a path or the name of an experiment stands for.

    Raises:
        UnknownNameError: there is no experiment of that name; with the nearest names.
    """
    path = Path(path_or_name)
    if path.suffix in _YAML or path.is_file():
        return path
    known = known_experiments()
    if str(path) not in known:
        raise UnknownNameError("experiment", str(path), known)
    return known[str(path)]


def located(path: Path) -> Path:
    """Where a file or folder is: at its path, else among what ships with kvprobe."""
    return path if path.exists() else shipped(path) or path


def _files_of(word: str, known: dict[str, Path]) -> list[Path]:
    path, sections = Path(word), {file.parent.name: file.parent for file in known.values()}
    if path.suffix in _YAML:
        if not located(path).is_file():
            raise ConfigError(f"There is no experiment file {word}; correct the path.")
        return [path]
    if word in known:
        return [known[word]]
    path = sections.get(f"section{word}", sections.get(word, path))
    if not located(path).is_dir():
        raise UnknownNameError("experiment", word, [*known, *sections])
    files = _in_folder(located(path), path)
    if not files:
        raise ConfigError(f"The folder {path} holds no experiment (no .yaml file); give another.")
    return files


def _in_folder(folder: Path, shown: Path) -> list[Path]:
    """The YAML files below `folder`, as if it were `shown`."""
    return [shown / file.relative_to(folder) for file in sorted(folder.rglob("*.yaml"))]
