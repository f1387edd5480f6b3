"""The store: whole or not at all, deterministic, and never silent about damage."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs_fakes
from hypothesis import given, settings
from hypothesis import strategies as st
from runs_fakes import FakeProbe, config, contents, load_subject

from kvprobe.errors import NumericsError, StoreError
from kvprobe.runs import events, load_result, preparation, provenance, run_experiment
from kvprobe.runs.results import read_rows
from kvprobe.runs.store import (
    DamagedCellError,
    Store,
    concatenated,
    json_bytes,
    parquet_bytes,
    signed,
    table_of,
    write_atomically,
)

ROWS = [{"pair": 0, "margin": 1.5, "word": "a"}, {"pair": 1, "margin": None, "flag": True}]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, "fake", "ab" * 32)


CONTENT = {"model": "m", "identity": {"weights_sha256": "w"}, "first": 0}
KEY = provenance.cell_key(CONTENT)


def test_a_cell_comes_back_as_it_was_written(store: Store) -> None:
    assert store.load(KEY) is None
    saved = store.save(CONTENT, ROWS, {"code": "c"})
    loaded = store.load(KEY)
    assert loaded is not None
    assert loaded.table.equals(saved.table)
    assert replace(loaded, table=saved.table) == saved
    assert loaded.table.to_pylist() == [
        {"pair": 0, "margin": 1.5, "word": "a", "flag": None},
        {"pair": 1, "margin": None, "word": None, "flag": True},
    ]


def truncate(cell: Path) -> None:
    data = cell.with_suffix(".parquet").read_bytes()
    cell.with_suffix(".parquet").write_bytes(data[: len(data) // 2])


def flip_a_bit(cell: Path) -> None:
    data = bytearray(cell.with_suffix(".parquet").read_bytes())
    data[len(data) // 2] ^= 1
    cell.with_suffix(".parquet").write_bytes(bytes(data))


def lose_the_rows(cell: Path) -> None:
    cell.with_suffix(".parquet").unlink()


def half_a_record(cell: Path) -> None:
    cell.with_suffix(".json").write_text(cell.with_suffix(".json").read_text()[:20])


def empty_record(cell: Path) -> None:
    cell.with_suffix(".json").write_bytes(b"")


def another_record(cell: Path) -> None:
    cell.with_suffix(".json").write_text("[]")


def lose_the_record(cell: Path) -> None:
    cell.with_suffix(".json").unlink()


def another_commit(cell: Path) -> None:
    record = json.loads(cell.with_suffix(".json").read_text())
    record["provenance"]["code"] = {"commit": "another"}
    cell.with_suffix(".json").write_bytes(json_bytes(record))


def no_number(cell: Path) -> None:
    text = cell.with_suffix(".json").read_text()
    cell.with_suffix(".json").write_text(re.sub(r'"first": \d+', '"first": NaN', text))


def swap(cell: Path) -> None:
    """With any other cell of the folder, or with itself where there is none."""
    other = next((file for file in sorted(cell.parent.glob("*.json")) if file.stem != cell.name), cell)
    for suffix in (".json", ".parquet"):
        first, second = (file.with_suffix(suffix) for file in (cell, other))
        held = first.read_bytes(), second.read_bytes()
        second.write_bytes(held[0])
        first.write_bytes(held[1])


DAMAGE = [truncate, flip_a_bit, lose_the_rows, half_a_record, empty_record, another_record, another_commit, no_number]


names = st.sampled_from(["model", "identity", "first", "code"])
plain = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2))
records = st.dictionaries(names, plain, max_size=3)


def says_the_same(one: bytes, other: bytes) -> bool:
    """Whether two JSON texts differ in blanks at most."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def without_checksum(store: Store, key: str) -> dict[str, Any]:
    record = json.loads((store.cells / f"{key}.json").read_bytes())
    return {name: value for name, value in record.items() if name != "sha256"}


@settings(max_examples=200)
@given(st.data())
def test_whatever_is_changed_in_a_cell_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any byte of either file, any part of the record, or the whole of it for another cell's."""
    store = Store(tmp_path_factory.mktemp("results"), "fake", "ab" * 32)
    content, other = data.draw(st.lists(records, min_size=2, max_size=2, unique_by=provenance.cell_key))
    stored, another = store.save(content, ROWS, {"code": "c"}), store.save(other, ROWS, {"code": "c"})
    record = store.cells / f"{stored.key}.json"
    match data.draw(st.sampled_from(["byte", "part", "signed", "cell", "rows"])):
        case "byte":
            file = data.draw(st.sampled_from([record, record.with_suffix(".parquet")]))
            old = file.read_bytes()
            place, byte = data.draw(st.integers(0, len(old) - 1)), data.draw(st.integers(0, 255))
            file.write_bytes(old[:place] + bytes([byte]) + old[place + 1 :])
            changed = file.read_bytes() != old and not (file == record and says_the_same(file.read_bytes(), old))
        case "part":
            told = json.loads(record.read_bytes())
            name = data.draw(st.sampled_from(sorted(told)))
            value = data.draw(plain)
            changed = told[name] != value or type(told[name]) is not type(value)
            record.write_bytes(json_bytes({**told, name: value}))
        case "signed":  # what was measured, told of otherwise and signed again
            changed = True
            rows = record.with_suffix(".parquet").read_bytes()
            told = {**without_checksum(store, stored.key), "content": other}
            record.write_bytes(json_bytes(signed(told, rows)))
        case "cell":
            changed = True
            for suffix in (".json", ".parquet"):
                record.with_suffix(suffix).write_bytes((store.cells / f"{another.key}{suffix}").read_bytes())
        case "rows":
            rows = parquet_bytes(table_of([*ROWS, {"pair": 2}]))
            changed = True
            record.with_suffix(".parquet").write_bytes(rows)
            record.write_bytes(json_bytes(signed(without_checksum(store, stored.key), rows)))
    if not changed:
        assert store.load(stored.key) is not None
        return
    with pytest.raises(DamagedCellError, match="it is measured again"):
        store.load(stored.key)


def test_one_process_at_a_time_may_measure_a_cell(store: Store) -> None:
    other = Store(store.root, "fake", "cd" * 32)  # with other claims, say
    with store.claimed(KEY) as mine:
        assert mine
        with other.claimed(KEY) as theirs:
            assert not theirs
        with other.claimed("another") as theirs:
            assert theirs
        store.save(CONTENT, ROWS, {})
    with other.claimed(KEY) as theirs:
        assert theirs
        assert other.load(KEY) is not None
    assert not list(store.root.rglob("*.lock"))


@pytest.mark.parametrize("damage", [*DAMAGE, swap, lose_the_record])
def test_a_damaged_cell_is_told_and_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    monkeypatch.setattr(provenance, "source_hash", lambda: "source")
    probe = FakeProbe()
    monkeypatch.setattr(preparation, "make_probe", lambda config: probe)
    seen: list[events.Event] = []

    def run() -> Path:
        return run_experiment(config(), results_dir=tmp_path, load_subject=load_subject, on_event=seen.append).folder

    folder = run()
    before = contents(folder)
    damage(next((folder / "cells").glob("*.parquet")).with_suffix(""))
    probe.measured.clear()
    seen.clear()
    run()
    cells = 2 if damage is swap else 1
    assert len(probe.measured) == cells
    warnings = [event for event in seen if isinstance(event, events.Warned)]
    assert len(warnings) == (0 if damage is lose_the_record else cells)
    said = r"The stored cell \w{12} is damaged \(.*\); it is measured again\."
    assert all(re.fullmatch(said, warning.message) for warning in warnings)
    assert contents(folder) == before


def test_a_damaged_sibling_is_told_and_not_taken_over(tmp_path: Path) -> None:
    old = Store(tmp_path, "fake", "aa" * 32)
    old.save(CONTENT, ROWS, {})
    flip_a_bit(old.cells / KEY)
    new = Store(tmp_path, "fake", "bb" * 32)
    with pytest.raises(DamagedCellError):
        new.load(KEY)
    old.save(CONTENT, ROWS, {})
    assert new.load(KEY) is not None
    assert (new.cells / f"{KEY}.parquet").read_bytes() == (old.cells / f"{KEY}.parquet").read_bytes()
    flip_a_bit(old.cells / KEY)
    assert new.load(KEY) is not None


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "write":
        monkeypatch.setattr(Path, "open", full)
    if place == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    if place == "replace":
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_full_and_read_only_disks_are_one_sentence(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    monkeypatch.setattr("kvprobe.runs.store.write_atomically", refuse(errno.ENOSPC))
    with pytest.raises(StoreError, match=r"cannot be written \(No space left on device\)"):
        store.save(CONTENT, ROWS, {})
    monkeypatch.setattr(Path, "touch", refuse(errno.EROFS))
    with pytest.raises(StoreError, match=r"cannot be written \(Read-only file system\)"):
        Store(store.root, "fake", "cc" * 32)


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    assert write_atomically(link, b"new") == link
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    for no_file in (Path("/dev/null"), tmp_path):
        with pytest.raises(OSError, match="no ordinary file"):
            write_atomically(no_file, b"lost")


def test_what_a_killed_run_left_is_swept_away_and_what_a_living_one_writes_is_not(store: Store) -> None:
    import socket
    import subprocess

    with subprocess.Popen(["true"]) as gone:
        pass
    dead = store.cells / f".key.parquet@{socket.gethostname()}.{gone.pid}.tmp"
    alive = store.cells / f".key.parquet@{socket.gethostname()}.{os.getpid()}.tmp"
    elsewhere = store.cells / ".key.parquet@another.host.1.tmp"
    for file in (dead, alive, elsewhere):
        file.write_bytes(b"half")
    Store(store.root, "fake", "ab" * 32)
    assert [file.exists() for file in (dead, alive, elsewhere)] == [False, True, True]
    assert store.load(KEY) is None


values = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), values), max_size=6))
def test_same_rows_same_bytes(rows: list[dict[str, float | None]]) -> None:
    assert parquet_bytes(table_of(rows)) == parquet_bytes(table_of([dict(row) for row in rows]))


cells = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.just(-0.0))
columns = st.fixed_dictionaries(
    {"margin": cells, "flag": st.none() | st.booleans(), "layer": st.integers(-(2**63), 2**63 - 1), "word": st.text()}
)


@settings(max_examples=50)
@given(st.lists(columns, max_size=8))
def test_rows_come_back_to_the_last_bit(rows: list[dict[str, Any]]) -> None:
    table = table_of(rows)
    read = pq.read_table(io.BytesIO(parquet_bytes(table)))
    assert read.schema == table.schema
    for name in table.column_names:
        assert list(map(repr, read[name].to_pylist())) == list(map(repr, table[name].to_pylist()))


def test_numpy_values_are_plain_values() -> None:
    plain = [{"a": 1, "b": 0.5, "c": True}]
    wrapped = [{"a": np.int64(1), "b": np.float64(0.5), "c": np.bool_(True)}]
    assert parquet_bytes(table_of(plain)) == parquet_bytes(table_of(wrapped))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan")])
def test_what_is_no_number_is_refused(store: Store, value: float) -> None:
    with pytest.raises(NumericsError, match="'margin' is"):
        store.save(CONTENT, [{"margin": value}], {})
    assert list(store.cells.iterdir()) == []


def test_tables_with_different_columns_go_together() -> None:
    one, other = table_of([{"a": 1, "b": None}]), table_of([{"b": 0.5, "c": "x"}])
    assert concatenated([one, pa.table({}), other]).to_pylist() == [
        {"a": 1, "b": None, "c": None},
        {"a": None, "b": 0.5, "c": "x"},
    ]
    assert concatenated([]).num_rows == 0


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no finished run"):
        load_result(tmp_path)
    with pytest.raises(StoreError, match="cannot be read"):
        read_rows(tmp_path)
    (tmp_path / "summary.json").write_text('{"config": ')
    with pytest.raises(StoreError, match="is damaged"):
        load_result(tmp_path)
    (tmp_path / "summary.json").write_text('{"config": NaN}')
    with pytest.raises(StoreError, match="is damaged"):
        load_result(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"config": runs_fakes.CONFIG}))
    with pytest.raises(StoreError, match="is damaged"):
        load_result(tmp_path)
