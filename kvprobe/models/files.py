"""Model files on disk: where they are kept, and whether they are what they should be."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvprobe.errors import ModelSourceError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done, 0 to 1."""

_CHUNK_BYTES = 1 << 20


def no_progress(stage: str, fraction: float) -> None:
    """A progress callback that stays silent."""


def cache_folder() -> Path:
    """Where pulled models are kept: `$KVPROBE_CACHE`, else `~/.cache/kvprobe`."""
    return Path(os.environ.get("KVPROBE_CACHE") or Path.home() / ".cache" / "kvprobe").expanduser()


def sha256_of(path: Path) -> str:
    """sha256 of a file, hexadecimal.

    A link into a Hugging Face blob store is named by the file's own sha256, so big files are not read twice.
    """
    if path.is_symlink():
        target = path.resolve()
        if target.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", target.name):
            return target.name
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_all(paths: Iterable[Path]) -> str:
    """One file's sha256, or for several that of their lines `<sha256>  <name>`, sorted by name."""
    files = sorted(paths, key=lambda path: path.name)
    if len(files) == 1:
        return sha256_of(files[0])
    lines = "".join(f"{sha256_of(path)}  {path.name}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


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
