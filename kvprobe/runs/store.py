"""Results on disk: cells written once and whole, found damaged when they are, and never computed twice.

    results/<experiment>/<hash>/config.yaml      the experiment, resolved
                                cells/<key>.parquet, <key>.json
                                rows.parquet     all cells of the run in a fixed order
                                summary.json     effects and verdicts
                                log.jsonl        times, machine, command: all that may differ between runs

A cell counts as finished when its `.json` is there, which is written last and holds the checksum of the rows.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvprobe.errors import KvprobeError, NumericsError, StoreError

SHORT_HASH = 12


class DamagedCellError(KvprobeError):
    """A stored cell is half-written or was changed; it is measured again."""


@dataclass(frozen=True)
class StoredCell:
    """A finished cell: its rows and its provenance."""

    key: str
    table: pa.Table
    provenance: dict[str, Any]


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
            DamagedCellError: it is there but not whole.
            StoreError: it cannot be read.
        """
        own = self._read(self.cells, key)
        if own is not None:
            return own
        for sibling in sorted(self.folder.parent.glob(f"*/cells/{key}.json")):
            try:
                found = self._read(sibling.parent, key)
            except DamagedCellError:
                continue
            if found is not None:
                for suffix in (".parquet", ".json"):
                    self._write(self.cells / f"{key}{suffix}", (sibling.parent / f"{key}{suffix}").read_bytes())
                return found
        return None

    def save(self, key: str, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> StoredCell:
        """Write a finished cell; bytes depend on the rows and the provenance alone.

        Raises:
            NumericsError: a row holds NaN or infinity.
            StoreError: the folder cannot be written.
        """
        table = table_of(rows)
        data = parquet_bytes(table)
        meta = {"key": key, "rows": table.num_rows, "sha256": hashlib.sha256(data).hexdigest(), **provenance}
        self._write(self.cells / f"{key}.parquet", data)
        self._write(self.cells / f"{key}.json", json_bytes(meta))
        return StoredCell(key, table, meta)

    def write_table(self, name: str, table: pa.Table) -> Path:
        """Write `table` as `name` in the experiment's folder."""
        return self._write(self.folder / name, parquet_bytes(table))

    def write_json(self, name: str, content: Any) -> Path:
        """Write `content` as `name` in the experiment's folder."""
        return self._write(self.folder / name, json_bytes(content))

    def write_text(self, name: str, text: str) -> Path:
        """Write `text` as `name` in the experiment's folder."""
        return self._write(self.folder / name, text.encode())

    def log(self, event: str, **details: Any) -> None:
        """Add one line, with the time, to the run log: the only file whose content may differ between equal runs."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **details}
        try:
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry, sort_keys=True) + "\n")
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def _read(self, folder: Path, key: str) -> StoredCell | None:
        meta_file, data_file = folder / f"{key}.json", folder / f"{key}.parquet"
        if not meta_file.exists():
            return None
        damaged = f"The stored cell {key[:SHORT_HASH]} is damaged"
        try:
            meta = json.loads(meta_file.read_bytes())
            data = data_file.read_bytes()
        except FileNotFoundError as error:
            raise DamagedCellError(f"{damaged} (its rows are missing); it is measured again.") from error
        except ValueError as error:
            raise DamagedCellError(f"{damaged} (its record is not JSON); it is measured again.") from error
        except OSError as error:
            raise StoreError(f"The results folder {folder} cannot be read ({error.strerror}).") from error
        if not isinstance(meta, dict) or meta.get("sha256") != hashlib.sha256(data).hexdigest():
            raise DamagedCellError(f"{damaged} (its checksum does not match); it is measured again.")
        return StoredCell(key, pq.read_table(io.BytesIO(data)), meta)

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
