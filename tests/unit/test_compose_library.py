"""The skill library: what is loaded is what was saved, to the bit, and only where it may be used."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import FAMILIES, tiny, tokens

from kvprobe.composing.base import Part, compose
from kvprobe.composing.chunk import Chunk, precompile
from kvprobe.composing.library import SkillLibrary
from kvprobe.engine.forward import prefill
from kvprobe.engine.operations import reposition
from kvprobe.errors import ConfigError, StoreError, UnknownNameError, UnsupportedError
from kvprobe.models.subject import Subject

IDS = tokens(12)


def changed(subject: Subject, **identity: str) -> Subject:
    return replace(subject, identity=replace(subject.identity, **identity))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_chunk_is_the_saved_one_to_the_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    subject, library = tiny(name, dtype), SkillLibrary(tmp_path / "skills")
    chunk = precompile(subject, IDS, "real", before=tokens(5, 1))
    moved = replace(chunk, cache=reposition(subject, chunk.cache, 40)[0])
    for label, given_chunk in (("plain", chunk), ("moved", moved)):
        library.save(subject, label, given_chunk)
        loaded = library.load(subject, label, verify=True)
        assert loaded.cache.fingerprint() == given_chunk.cache.fingerprint()
        assert (loaded.token_ids, loaded.header, loaded.header_tokens) == (tuple(IDS), "real", 5)
        assert loaded.receipt == chunk.receipt
    # A chunk moved, saved and loaded goes on from its source keys, so that nothing of the first move is left.
    back = reposition(subject, library.load(subject, "moved").cache, -40)[0]
    assert back.fingerprint() == chunk.cache.fingerprint()
    plain = library.load(subject, "plain").cache.layers[0]
    assert plain.source_keys is plain.keys
    assert library.names() == ["moved", "plain"]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_loaded_chunk_composes_as_the_resident_one(tmp_path: Path, name: str) -> None:
    subject, library = tiny(name, torch.float64), SkillLibrary(tmp_path)
    chunk = precompile(subject, IDS, "real", before=tokens(5, 1))
    library.save(subject, "a", chunk)
    parts = [Part("b", tuple(tokens(5, 1))), Part.reused("c", library.load(subject, "a")), Part("d", (7, 8))]
    found = compose(subject, parts).decide(subject).logits
    expected = prefill(subject, [*tokens(5, 1), *IDS, 7, 8]).logits
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@given(name=st.one_of(st.text(max_size=120), st.sampled_from(["..", "../a", "a/b", "/etc/a", ".a", "a\\b", "a\0", ""])))
def test_no_name_leaves_the_folder(name: str) -> None:
    library = SkillLibrary("/nowhere/skills")
    try:
        path = library.path(name)
    except ConfigError:
        assert not (name.isascii() and name.isalnum() and len(name) <= 100)
        return
    assert path.parent == library.folder
    assert path.resolve().parent == library.folder.resolve()
    assert path.stem == name


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fullmatch=True))
def test_every_plain_name_comes_back(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    library, subject = SkillLibrary(tmp_path_factory.mktemp("skills")), tiny("qwen3")
    library.save(subject, name, precompile(subject, IDS[:2], "none"))
    assert library.names() == [name]
    assert name in library
    assert len(library) == 1
    library.remove(name)
    assert library.names() == []


def test_models_that_differ_are_refused_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    subject, library = tiny("llama"), SkillLibrary(tmp_path)
    library.save(subject, "a", precompile(subject, IDS, "none"))
    others = {
        "weights": changed(subject, weights_sha256="1" * 64),
        "tokenizer": changed(subject, tokenizer_sha256="1" * 64),
        "dtype": tiny("llama", torch.bfloat16),
        "configuration": tiny("llama_linear"),
    }
    for what, other in others.items():
        with pytest.raises(UnsupportedError, match=rf"a\.safetensors.*{what}.*compile the text again"):
            library.load(other, "a")
    # Another kernel or device computes the same keys but for rounding.
    assert library.load(changed(subject, attention="eager"), "a").token_ids == tuple(IDS)


def test_a_chunk_of_another_model_is_not_saved(tmp_path: Path) -> None:
    chunk = precompile(tiny("qwen3"), IDS, "none")
    for other in (tiny("qwen3", torch.float64), tiny("gemma2")):
        with pytest.raises(UnsupportedError, match="compiled by a model of other"):
            SkillLibrary(tmp_path).save(other, "a", chunk)
    assert SkillLibrary(tmp_path).names() == []


def test_broken_and_foreign_files_are_named(tmp_path: Path) -> None:
    subject, library = tiny("qwen3"), SkillLibrary(tmp_path)
    whole = library.save(subject, "a", precompile(subject, IDS, "none")).read_bytes()
    with safe_open(library.path("a"), framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    fewer = {key: value for key, value in tensors.items() if key != "layers.1.values"}
    short = {**tensors, "positions": tensors["positions"][:3]}

    def damaged(label: str, data: bytes | dict[str, torch.Tensor], about: dict[str, str]) -> None:
        if isinstance(data, bytes):
            library.path(label).write_bytes(data)
        else:
            save_file(data, library.path(label), about)

    damaged("cut", whole[:-40], {})
    damaged("empty", b"", {})
    damaged("text", b"no model here, " * 20, {})
    damaged("foreign", {"weight": torch.ones(2)}, {"format": "pt"})
    damaged("lacking", fewer, metadata)
    damaged("short", short, metadata)
    damaged("silent", tensors, {key: value for key, value in metadata.items() if key != "config_sha256"})
    damaged("header", tensors, {**metadata, "header": "tail"})
    damaged("receipt", tensors, {**metadata, "receipt": json.dumps({"miles": 3})})
    for label in ("cut", "empty", "text", "foreign", "lacking", "short", "silent", "header", "receipt"):
        with pytest.raises(StoreError, match=rf"{label}\.safetensors is broken.*compile the text again"):
            library.load(subject, label)
    with pytest.raises(StoreError, match="broken"):
        library.skills()


def test_a_flipped_bit_is_found_when_asked(tmp_path: Path) -> None:
    subject, library = tiny("qwen3"), SkillLibrary(tmp_path)
    path = library.save(subject, "a", precompile(subject, IDS, "none"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(bytes(data))
    library.load(subject, "a")
    with pytest.raises(StoreError, match=r"a\.safetensors.*checksum"):
        library.load(subject, "a", verify=True)


def test_absent_and_taken_names(tmp_path: Path) -> None:
    subject, library = tiny("qwen3"), SkillLibrary(tmp_path / "not" / "there")
    assert library.skills() == []
    with pytest.raises(UnknownNameError, match="no skill named 'refunds'"):
        library.load(subject, "refunds")
    library.save(subject, "refund", precompile(subject, IDS, "none"))
    with pytest.raises(UnknownNameError, match="did you mean 'refund'"):
        library.remove("refunds")
    with pytest.raises(ConfigError, match="already"):
        library.save(subject, "refund", precompile(subject, IDS, "none"))


def test_a_chunk_in_use_outlives_its_file(tmp_path: Path) -> None:
    subject, library = tiny("qwen3"), SkillLibrary(tmp_path)
    first, second = precompile(subject, IDS, "none"), precompile(subject, tokens(9, 3), "none")
    library.save(subject, "a", first)
    using = library.load(subject, "a")
    library.save(subject, "a", second, replace=True)
    assert using.cache.fingerprint() == first.cache.fingerprint()
    assert library.load(subject, "a").cache.fingerprint() == second.cache.fingerprint()
    library.remove("a")
    assert using.cache.fingerprint() == first.cache.fingerprint()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, library = tiny("qwen3"), SkillLibrary(tmp_path)
    library.save(subject, "a", precompile(subject, IDS, "none"))
    before = library.path("a").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvprobe.composing.library.save_file", full)
    with pytest.raises(StoreError, match="No space left"):
        library.save(subject, "a", precompile(subject, IDS[:5], "none"), replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert library.path("a").read_bytes() == before


def test_what_a_skill_says_of_itself(tmp_path: Path) -> None:
    subject, library = tiny("gemma3"), SkillLibrary(tmp_path)
    chunk = precompile(subject, IDS, "real", before=[5, 6])
    path = library.save(subject, "a", chunk)
    (skill,) = library.skills()
    assert (skill.name, skill.tokens, skill.header, skill.header_tokens) == ("a", 12, "real", 2)
    assert skill.nbytes == path.stat().st_size >= chunk.cache.nbytes
    assert skill.receipt == chunk.receipt
    assert skill.identity["dtype"] == "float32"


_LOAD_ALL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tiny_models import tiny
from kvprobe.composing.library import SkillLibrary
library, subject = SkillLibrary(sys.argv[1]), tiny("qwen3")

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

library.load(subject, "s0")
before = resident()
kept = [library.load(subject, name) for name in library.names()]
loaded = resident()
for chunk in kept:
    for layer in chunk.cache.layers:
        layer.keys.sum(), layer.values.sum()
print(loaded - before, resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_loading_many_skills_takes_next_to_no_memory(tmp_path: Path) -> None:
    subject, library = tiny("qwen3"), SkillLibrary(tmp_path)
    ids = tokens(20)
    small = precompile(subject, ids, "none")
    wide = 20_000
    cache = small.cache.take(torch.arange(20).repeat(wide // 20))
    big = Chunk(tuple(ids) * (wide // 20), replace(cache, positions=torch.arange(wide)))
    for number in range(12):
        library.save(subject, f"s{number}", big)
    command = [sys.executable, "-c", _LOAD_ALL, str(tmp_path), str(Path(__file__).parents[1])]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    loaded, used = map(int, found.split())
    # Token ids are read, keys and values are not until they are used.
    assert loaded < 0.25 * 12 * big.cache.nbytes < 0.8 * 12 * big.cache.nbytes < used
