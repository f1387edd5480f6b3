"""Results on disk: cells written once and whole, found damaged when they are, and never computed twice.

    results/<experiment>/<hash>/config.yaml      the experiment, resolved
                                cells/<key>.parquet, <key>.json
                                rows.parquet     all cells of the run in a fixed order
                                summary.json     effects and verdicts
                                log.jsonl        times, machine, command: all that may differ between runs

A cell counts as finished when its record, the `.json`, is there. It is written last, names everything that determines
the cell, whose hash is the key, and is signed with a checksum over itself and the rows.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from kvprobe.errors import KvprobeError, NumericsError, StoreError
from kvprobe.runs.provenance import cell_key

SHORT_HASH = 12
LOG = "log.jsonl"


class DamagedCellError(KvprobeError):
    """A stored cell is half-written or was changed; it is measured again."""


@dataclass(frozen=True)
class StoredCell:
    """A finished cell: its rows, what determines them, and the run that measured it."""

    key: str
    table: pa.Table
    content: Mapping[str, Any]
    provenance: Mapping[str, Any]


class Store:
    """The folder of one experiment at one hash.

    Args:
        results_dir: root of all results.
        experiment: its name.
        experiment_hash: of its configuration.

    Raises:
        StoreError: the folder cannot be made or written.
    """

    def __init__(self, results_dir: str | Path, experiment: str, experiment_hash: str) -> None:
        self.root = Path(results_dir)
        self.folder = self.root / experiment / experiment_hash[:SHORT_HASH]
        self.cells = self.folder / "cells"
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
            self._sweep()
            # A folder may exist and still be read-only: better known now than after an hour of measuring.
            probe = _temporary(self.cells / "writable")
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def load(self, key: str) -> StoredCell | None:
        """The finished cell `key`, from this folder or from another hash of the same experiment; else `None`.

        Raises:
            DamagedCellError: it is there but not whole, or is another one.
            StoreError: it cannot be read.
        """
        damage: DamagedCellError | None = None
        for folder in [self.cells, *sorted(self.folder.parent.glob("*/cells"))]:
            try:
                found = _read_cell(folder, key)
            except DamagedCellError as error:
                damage = damage or error
                continue
            if found is not None:
                if folder != self.cells:
                    for suffix in (".parquet", ".json"):
                        self._write(self.cells / f"{key}{suffix}", (folder / f"{key}{suffix}").read_bytes())
                return found
        if damage is not None:
            raise damage
        return None

    def save(
        self, content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
    ) -> StoredCell:
        """Write a finished cell; bytes depend on the arguments alone.

        Args:
            content: everything that determines the cell.
            rows: measured.
            provenance: what else is told of it.

        Raises:
            NumericsError: a row holds NaN or infinity.
            StoreError: the folder cannot be written.
        """
        key, table = cell_key(content), table_of(rows)
        data = parquet_bytes(table)
        record = {"key": key, "content": content, "rows": table.num_rows, "provenance": provenance}
        self._write(self.cells / f"{key}.parquet", data)
        self._write(self.cells / f"{key}.json", json_bytes(signed(record, data)))
        return StoredCell(key, table, content, provenance)

    @contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Whether this process alone may measure the cell inside the block; not while another one does.

        Raises:
            StoreError: the folder cannot be written.
        """
        file = self._lock_file(key)
        lock = FileLock(file)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        try:
            yield True
        finally:
            # Who waits for it finds the cell finished, so that it may go before it is released.
            file.unlink(missing_ok=True)
            lock.release()

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Write `data` as `name` in the experiment's folder."""
        return self._write(self.folder / name, data)

    def write_text(self, name: str, text: str) -> Path:
        """Write `text` as `name` in the experiment's folder."""
        return self._write(self.folder / name, text.encode())

    def log(self, event: str, **details: Any) -> None:
        """Add one line, with the time, to the run log: the only file whose content may differ between equal runs."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **details}
        try:
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry, sort_keys=True) + "\n")
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def _write(self, path: Path, data: bytes) -> Path:
        try:
            return write_atomically(path, data)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def _sweep(self) -> None:
        """Remove what killed runs on this machine left half-written."""
        for leftover in [*self.folder.glob(".*.tmp"), *self.cells.glob(".*.tmp")]:
            host, _, process = leftover.name.removesuffix(".tmp").rpartition(".")
            if host.endswith(f"@{_host()}") and process.isdigit() and not _alive(int(process)):
                leftover.unlink(missing_ok=True)
        for lock in self.folder.parent.glob(".*.lock"):
            if (self.cells / f"{lock.stem[1:]}.json").exists():
                lock.unlink(missing_ok=True)

    def _lock_file(self, key: str) -> Path:
        """Of a cell under way, whichever hash of the experiment asks for it."""
        return self.folder.parent / f".{key}.lock"


def _read_cell(folder: Path, key: str) -> StoredCell | None:
    record_file, data_file = folder / f"{key}.json", folder / f"{key}.parquet"
    if not record_file.exists():
        return None

    def damaged(why: str) -> DamagedCellError:
        return DamagedCellError(f"The stored cell {key[:SHORT_HASH]} is damaged ({why}); it is measured again.")

    try:
        record = read_json(record_file.read_bytes())
        data = data_file.read_bytes()
    except FileNotFoundError as error:
        raise damaged("its rows are missing") from error
    except ValueError as error:
        raise damaged("its record is not JSON") from error
    except OSError as error:
        raise StoreError(f"The results folder {folder} cannot be read ({error.strerror}).") from error
    if not is_signed(record, data):
        raise damaged("its checksum does not match")
    try:
        table = pq.read_table(io.BytesIO(data))
        content, rows, provenance = record["content"], record["rows"], record["provenance"]
    except (KeyError, ValueError, OSError) as error:
        raise damaged("it is of another form") from error
    if record["key"] != key or cell_key(content) != key:
        raise damaged("it is another cell")
    if table.num_rows != rows:
        raise damaged(f"it has {table.num_rows} rows and not {rows}")
    return StoredCell(key, table, content, provenance)


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table: columns in order of first appearance, missing values null, numpy scalars unwrapped.

    Raises:
        NumericsError: a value is NaN or infinite, which is never a measurement; a missing one is `None`.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([_plain(name, row.get(name)) for row in rows]) for name in columns})


def concatenated(tables: Iterable[pa.Table]) -> pa.Table:
    """One table of all; a column that is missing in one of them is null there."""
    parts = [table for table in tables if table.num_columns]
    return pa.concat_tables(parts, promote_options="permissive").combine_chunks() if parts else pa.table({})


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as parquet, small and exact: the same bytes for the same content."""
    plain = table.replace_schema_metadata(None)
    # Measurements are hardly ever equal, but their first bytes are alike.
    measured = [field.name for field in plain.schema if pa.types.is_floating(field.type)]
    labels = [name for name in plain.column_names if name not in measured]
    sink = io.BytesIO()
    pq.write_table(
        plain,
        sink,
        compression="zstd",
        compression_level=15,
        use_dictionary=labels,
        use_byte_stream_split=measured,
        write_statistics=False,
    )
    return sink.getvalue()


def json_bytes(content: Any) -> bytes:
    """Strict JSON with sorted keys."""
    return (json.dumps(content, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def read_json(data: bytes) -> Any:
    """What strict JSON says.

    Raises:
        ValueError: it is no JSON, or holds `NaN` or `Infinity`, which are none.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def signed(record: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """The record with a checksum over itself and the bytes that it tells of."""
    return {**record, "sha256": hashlib.sha256(json_bytes(record) + data).hexdigest()}


def is_signed(record: Any, data: bytes) -> bool:
    """Whether neither was changed since `signed`."""
    if not isinstance(record, dict):
        return False
    return record == signed({key: value for key, value in record.items() if key != "sha256"}, data)


def write_atomically(path: Path, data: bytes) -> Path:
    """Write `data` to `path` so that at any moment it holds the old content or the new one, never a part.

    A link stays, and the file it leads to is written.

    Raises:
        OSError: it cannot be written, or is a device or a folder.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    temporary = _temporary(target)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return path


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "item"):  # numpy scalars and one-element tensors
        value = value.item()
    if isinstance(value, float) and value - value != 0:
        raise NumericsError(f"The measurement {name!r} is {value}; the model or the intervention left the numbers.")
    return value


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}@{_host()}.{os.getpid()}.tmp")


def _host() -> str:
    return socket.gethostname()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _cannot_write(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"The results folder {folder} cannot be written ({error.strerror or error}); choose another or free it."
    )
