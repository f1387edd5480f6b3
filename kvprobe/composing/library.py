"""A library of compiled chunks on disk, each usable by the model that compiled it and by no other."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.composing.chunk import Chunk, Header
from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError, StoreError, UnknownNameError, UnsupportedError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FORMAT = "kvprobe chunk 2"
SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# What must be the same, and how a user would call it.
_IDENTITY = {
    "weights_sha256": "weights",
    "config_sha256": "configuration",
    "tokenizer_sha256": "tokenizer",
    "dtype": "dtype",
}
_KEYS = (
    *_IDENTITY,
    "version",
    "model",
    "model_sha256",
    "header",
    "header_tokens",
    "tokens",
    "content_sha256",
    "receipt",
)


@dataclass(frozen=True)
class Skill:
    """What a library says of one of its chunks without reading its keys and values.

    Attributes:
        name: in the library.
        tokens: how many.
        header: what it was compiled behind.
        header_tokens: how many tokens that was.
        nbytes: of its file.
        model: name of the model that compiled it.
        identity: weights, configuration and tokenizer as sha256, and dtype: what a model must share to use it.
        version: of kvprobe that wrote it.
        receipt: what compiling it cost.
    """

    name: str
    tokens: int
    header: Header
    header_tokens: int
    nbytes: int
    model: str
    identity: Mapping[str, str]
    version: str
    receipt: Receipt


class SkillLibrary:
    """Chunks in one folder, a safetensors file each, found by name.

    A chunk is loaded by mapping its file into memory: nothing is read before it is used, on a CPU nothing is copied,
    and of many skills only those in use take memory. A file is written whole or not at all; a chunk that is in use
    stays what it is when its skill is replaced or removed.

    Args:
        folder: made on the first save.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def save(self, subject: Subject, name: str, chunk: Chunk, *, replace: bool = False) -> Path:
        """Write `chunk`, compiled by `subject`, as `name`; returns its file.

        Raises:
            ConfigError: the name cannot be a file's, or is taken and `replace` is not set.
            StoreError: the folder cannot be written.
            UnsupportedError: another model compiled the chunk, or its RoPE cannot be moved.
        """
        path = self.path(name)
        if path.exists() and not replace:
            raise ConfigError(f"There is a skill {name!r} in {self.folder} already; replace it or choose another name.")
        chunk.check_model(subject)
        identity = skill_identity(subject)
        metadata = {
            "format": FORMAT,
            "version": _version(),
            "model": subject.name,
            "model_sha256": subject.identity.fingerprint,
            **identity,
            "header": chunk.header,
            "header_tokens": str(chunk.header_tokens),
            "tokens": str(len(chunk)),
            "content_sha256": _content(chunk),
            "receipt": json.dumps(asdict(chunk.receipt), sort_keys=True),
        }
        _write(path, _tensors(chunk), metadata)
        return path

    def load(self, subject: Subject, name: str, *, verify: bool = False) -> Chunk:
        """The chunk called `name`, for the model that compiled it.

        Args:
            subject: the model.
            name: of the skill.
            verify: read all of it now and compare with the checksum it was written with.

        Raises:
            ConfigError: the name cannot be a file's.
            UnknownNameError: there is no such skill; with the nearest names.
            UnsupportedError: it was compiled with other weights, configuration, tokenizer or dtype.
            StoreError: its file is broken or is no chunk.
        """
        path = self._existing(name)
        with _reading(path) as (file, metadata):
            chunk = _chunk(file, metadata)
            if verify and _content(chunk) != metadata["content_sha256"]:
                raise StoreError("its checksum does not match")
        _check_identity(path, metadata, subject)
        return _moved_to(chunk, subject.device)

    def names(self) -> list[str]:
        """The names of all skills, sorted."""
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(f"The skill library {self.folder} is a file; name a folder.")
        files = self.folder.glob(f"*{SUFFIX}") if self.folder.is_dir() else ()
        return sorted(file.stem for file in files if _NAME.fullmatch(file.stem) and file.is_file())

    def skills(self) -> list[Skill]:
        """What is known of all skills, sorted by name; only the heads of their files are read.

        Raises:
            StoreError: a file is broken or is no chunk; names it.
        """
        return [self.describe(name) for name in self.names()]

    def describe(self, name: str) -> Skill:
        """What is known of one skill.

        Raises:
            ConfigError, UnknownNameError, StoreError: as `load`.
        """
        path = self._existing(name)
        with _reading(path) as (_, metadata):
            return Skill(
                name=name,
                tokens=int(metadata["tokens"]),
                header=_header(metadata),
                header_tokens=int(metadata["header_tokens"]),
                nbytes=path.stat().st_size,
                model=metadata["model"],
                identity={key: metadata[key] for key in _IDENTITY},
                version=metadata["version"],
                receipt=Receipt(**json.loads(metadata["receipt"])),
            )

    def remove(self, name: str) -> None:
        """Delete a skill's file.

        Raises:
            ConfigError, UnknownNameError: as `load`.
            StoreError: the folder cannot be written.
        """
        path = self._existing(name)
        try:
            path.unlink()
        except OSError as error:
            raise _cannot_write(path, error) from error

    def path(self, name: str) -> Path:
        """The file of a skill called `name`, there or not.

        Raises:
            ConfigError: the name cannot be a file's.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"A skill cannot be called {name[:100]!r}; use up to 100 letters, digits, '.', '-' and '_', and begin "
                "with a letter or a digit."
            )
        return self.folder / f"{name}{SUFFIX}"

    def _existing(self, name: str) -> Path:
        path = self.path(name)
        if not path.is_file():
            raise UnknownNameError("skill", name, self.names())
        return path

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, name: str) -> bool:
        return name in self.names()


def skill_identity(subject: Subject) -> dict[str, str]:
    """What a model must share with the one that compiled a chunk; its configuration covers RoPE and its scaling.

    Raises:
        UnsupportedError: the RoPE scaling does not allow moving, so that a chunk could never be placed.
    """
    subject.architecture.rotary(subject.model)
    return {key: getattr(subject.identity, key) for key in _IDENTITY}


def _check_identity(path: Path, metadata: Mapping[str, str], subject: Subject) -> None:
    own = skill_identity(subject)
    other = [
        f"{what} ({metadata[key][:16]}, not {own[key][:16]})"
        for key, what in _IDENTITY.items()
        if metadata[key] != own[key]
    ]
    if other:
        raise UnsupportedError(
            f"{path} was compiled by {metadata['model']} and cannot be used by {subject.name}, for they differ in "
            f"{' and '.join(other)}; compile the text again with {subject.name}."
        )


def _tensors(chunk: Chunk) -> dict[str, Tensor]:
    """By name; original keys of a chunk that was never moved are its keys and not written twice."""
    cache = chunk.cache
    tensors = {
        "token_ids": torch.tensor(chunk.token_ids, dtype=torch.long),
    }
    tensors |= {name: held for name in _places() if (held := getattr(cache, name)) is not None}
    for number, layer in enumerate(cache.layers):
        tensors[f"layers.{number}.keys"] = layer.keys
        tensors[f"layers.{number}.values"] = layer.values
        if layer.source_keys is not layer.keys:
            tensors[f"layers.{number}.source_keys"] = layer.source_keys
    # Views of a longer cache share storage with one another, which the format refuses.
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def _chunk(file: Any, metadata: Mapping[str, str]) -> Chunk:
    names = set(file.keys())
    layers: list[LayerKV] = []
    while f"layers.{len(layers)}.keys" in names:
        stem = f"layers.{len(layers)}"
        keys, values = file.get_tensor(f"{stem}.keys"), file.get_tensor(f"{stem}.values")
        source = file.get_tensor(f"{stem}.source_keys") if f"{stem}.source_keys" in names else keys
        layers.append(LayerKV(keys, values, source))
    # Small and used at once, so they are read here and now.
    places = {name: file.get_tensor(name).clone() for name in _places() if name in names}
    return Chunk(
        tuple(file.get_tensor("token_ids").tolist()),
        KVCache(tuple(layers), **places),
        _header(metadata),
        int(metadata["header_tokens"]),
        Receipt(**json.loads(metadata["receipt"])),
        metadata["model_sha256"],
    )


def _places() -> list[str]:
    """Names of what a cache holds beside its layers: where its entries stand and stood."""
    return [part.name for part in fields(KVCache) if part.name != "layers"]


def _header(metadata: Mapping[str, str]) -> Header:
    for header in get_args(Header):
        if metadata["header"] == header:
            return header
    raise StoreError(f"it names a header {metadata['header'][:20]!r} that is not known")


def _content(chunk: Chunk) -> str:
    return hashlib.sha256(f"{chunk.token_ids} {chunk.cache.fingerprint()}".encode()).hexdigest()


def _moved_to(chunk: Chunk, device: torch.device) -> Chunk:
    """The chunk on the model's device; on a CPU as it is."""
    if device.type == "cpu":
        return chunk

    def moved(layer: LayerKV) -> LayerKV:
        keys, values = layer.keys.to(device), layer.values.to(device)
        return LayerKV(keys, values, keys if layer.source_keys is layer.keys else layer.source_keys.to(device))

    return replace(chunk, cache=replace(chunk.cache, layers=tuple(map(moved, chunk.cache.layers))))


@contextmanager
def _reading(path: Path) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """The open file and what it says of itself; whatever is wrong with its content becomes one sentence."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise StoreError(f"it is not in the format {FORMAT!r}")
            lacking = [key for key in _KEYS if key not in metadata]
            if lacking:
                raise StoreError(f"it does not say its {lacking[0]}")
            yield file, metadata
    except (SafetensorError, OSError, TypeError, ValueError, StoreError, UnsupportedError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> StoreError:
    what = str(error).rstrip(".")
    return StoreError(f"{path} is broken or no compiled chunk ({what}); remove it and compile the text again.")


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write beside the file and rename, so that at any moment it is the old one or the new one, never a part."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        save_file(dict(tensors), temporary, metadata)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _cannot_write(path: Path, error: Exception) -> StoreError:
    reason = getattr(error, "strerror", None) or error
    return StoreError(
        f"The skill library {path.parent} cannot be written ({reason}); choose another folder or free it."
    )


def _version() -> str:
    try:
        return importlib.metadata.version("kvprobe")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
