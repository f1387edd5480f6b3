"""YAML that anyone may have written: plain data or one sentence, and never a wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.errors import ConfigError
from kvprobe.yaml_files import MOST_BYTES, MOST_LEVELS, MOST_VALUES, read_plain

MANY = settings(deadline=None, max_examples=150)
WORDS = "- |: |&a |*a|<<: |!!int |!!set |2026-13-99|!!timestamp |!!python/name:os.system|.nan|-.inf|1e999|\\ud800|---\n|\n  "
PIECES = st.sampled_from([*"[]{}:?-,&*!|>'\"#%@\n\t a1.~=<\\\0\x1b\x85\u2028\ud7ff", *WORDS.split("|"), "9" * 30])


def refused(file: Path, content: str | bytes) -> str:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read_plain(file)
    assert time.process_time() - started < 1
    told = str(caught.value)
    assert told.startswith(str(file))
    assert "\n" not in told
    return told


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml") / "any.yaml"


@MANY
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_plain_data_or_one_sentence(place: Path, text: str) -> None:
    place.write_text(text, encoding="utf-8")
    started = time.process_time()
    try:
        assert plain(read_plain(place))
    except ConfigError as error:
        told = str(error)
        assert "\n" not in told
    assert time.process_time() - started < 1


def plain(data: object) -> bool:
    if isinstance(data, dict):
        return all(plain(part) for pair in data.items() for part in pair)
    if isinstance(data, list):
        return all(map(plain, data))
    return data is None or isinstance(data, str) or (data - data == 0 and abs(data) < 2e308)  # type: ignore[operator]


@MANY
@given(st.integers(2, 12), st.integers(2, 400))
def test_aliases_count_as_what_they_stand_for(place: Path, wide: int, levels: int) -> None:
    lines = ["a0: &a0 x"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * wide)}]" for n in range(1, levels)]
    total = sum((wide ** (n + 1) - 1) // (wide - 1) + 1 for n in range(levels)) + 1
    place.write_text("\n".join(lines))
    if total <= MOST_VALUES:
        assert len(read_plain(place)) == levels
    else:
        assert "values, aliases included" in refused(place, place.read_text())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a" * (MOST_BYTES + 1), "is larger than 1 MB"),
        (b"- x\n" * (MOST_BYTES // 4), f"more than {MOST_VALUES:,} values"),
        (b"[" * 100_000, "nest"),
        ("- " * 100_000, f"nests more than {MOST_LEVELS} levels"),
        ("a: &a [*a]", "line 1: the alias *a stands inside what it names"),
        ("a: &a\n  b: {c: *a}", "line 2: the alias *a stands inside"),
        ("? [a, b]\n: c", "line 1: a key must be a word"),
        ("seed: 9223372036854775808", "a number of 'seed' does not fit into 64 bits"),
        ("claims: [{paper_value: .nan}]", "'paper_value' is nan; give a finite number"),
        ("day: 2026-12-01", "'day' is read as a date; put it in quotes"),
        ("day: 2026-13-99", "is not of the type that it is written as"),
        ('a: "\\ud800"', "line 1 is not valid YAML"),
        ("a: \x00", "not allowed"),
        ("n: " + "1" * 5000, "is not of the type"),
    ],
)
def test_what_is_refused(place: Path, content: str | bytes, said: str) -> None:
    assert said in refused(place, content)


def test_what_cannot_be_opened(place: Path) -> None:
    for name in ("none.yaml", "x" * 300, "nul\0", "."):
        with pytest.raises(ConfigError, match=r"no such file|cannot be read"):
            read_plain(place.parent / name)
