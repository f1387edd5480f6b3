"""Model files on disk: where they are kept, and whether they are what they should be."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvprobe.errors import ModelSourceError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done, 0 to 1."""

_BIG_BYTES = 64 << 20
_SETTLED_SECONDS = 60
_SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")
_NO_SETTINGS = ("card.json", "model.safetensors.index.json")


def no_progress(stage: str, fraction: float) -> None:
    """A progress callback that stays silent."""


def cache_folder() -> Path:
    """Where pulled models are kept: `$KVPROBE_CACHE`, else `~/.cache/kvprobe`."""
    return Path(os.environ.get("KVPROBE_CACHE") or Path.home() / ".cache" / "kvprobe").expanduser()


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, hexadecimal, through links and whatever the file is called.

    That of a big file is kept, and read again when the file's place, inode, size, or time of change differ.
    """
    if path.stat().st_size < _BIG_BYTES or os.name != "posix":
        return _read_sha256(path)
    place = _digest_file(path)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"[0-9a-f]{64}", kept := place.read_text(encoding="ascii")):
            return kept
    # A write within one tick of the clock, or to mapped memory not yet written back, leaves the time as it is.
    settled = time.time() - path.stat().st_ctime > _SETTLED_SECONDS
    digest = _read_sha256(path)
    if settled and _digest_file(path) == place:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(digest, encoding="ascii")
    return digest


def _digest_file(path: Path) -> Path:
    """Where the sha256 of a big file in its present state is kept."""
    state = path.stat()
    # The time of change moves with every write, and unlike that of modification no program can set it back.
    marks = (str(path.resolve()), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return cache_folder() / "digests" / hashlib.sha256(repr(marks).encode()).hexdigest()


def _read_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Iterable[Path]) -> str:
    """One file's sha256, or for several that of their lines `<sha256>  <name>`, sorted by name."""
    files = sorted(paths, key=lambda path: path.name)
    if len(files) == 1:
        return sha256_of(files[0])
    lines = "".join(f"{sha256_of(path)}  {path.name}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def settings_sha256(folder: Path) -> str:
    """sha256 of all configuration and tokenizer files of a model folder; see `sha256_of_all`."""
    found = (file for pattern in _SETTINGS for file in folder.glob(pattern))
    return sha256_of_all(file for file in found if file.name not in _NO_SETTINGS)


def verify_sha256(measured: str, wanted: str | None, what: Path | str, mend: str) -> None:
    """Refuse a file that is not the pinned one.

    Raises:
        ModelSourceError: names the file, both hashes and `mend`.
    """
    if wanted is not None and measured != wanted:
        raise ModelSourceError(
            f"{what} has sha256 {measured[:16]}… and not the pinned {wanted[:16]}…, so it is damaged or another "
            f"version; {mend}."
        )


def check_safetensors(paths: Iterable[Path]) -> None:
    """Read the headers of weight files and compare them with the files' lengths.

    Raises:
        ModelSourceError: a file is cut short or is no safetensors file.
    """
    for path in paths:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelSourceError(
                f"{path} is cut short or is no safetensors file ({error}); fetch or copy it again."
            ) from error
