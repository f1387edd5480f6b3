"""Which experiment files a word on the command line stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvprobe.errors import ConfigError, UnknownNameError

FOLDER = Path("experiments")


def experiment_files(words: Sequence[str]) -> list[Path]:
    """The YAML files of paths, folders, sections (`section3` or `3`) and names (`locality`), each once.

    Raises:
        ConfigError: a folder holds no experiment.
        UnknownNameError: a word is none of these; with the nearest names.
    """
    files = [file for word in words for file in _files_of(word)]
    return list(dict.fromkeys(files))


def known_experiments() -> dict[str, Path]:
    """The experiments of the working directory by name."""
    return {file.stem: file for file in _in_folder(FOLDER)}


def _files_of(word: str) -> list[Path]:
    for path in (Path(word), FOLDER / word, FOLDER / f"section{word}"):
        if path.is_dir():
            files = _in_folder(path)
            if not files:
                raise ConfigError(f"The folder {path} holds no experiment (no .yaml file); give another.")
            return files
        if path.is_file():
            return [path]
    if Path(word).suffix in {".yaml", ".yml"}:
        raise ConfigError(f"There is no experiment file {word}; correct the path.")
    known = known_experiments()
    if not known:
        raise ConfigError(
            f"There is no experiment {word!r}, and no folder {FOLDER} with others here; give the path of a YAML file, "
            "or work in kvprobe's checkout."
        )
    if word not in known:
        raise UnknownNameError("experiment", word, known)
    return [known[word]]


def _in_folder(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.yaml"))
