"""Makes finished runs small enough to publish: nothing stays that `kvprobe report` makes again."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from kvprobe.errors import StoreError
from kvprobe.runs.claims import Claim
from kvprobe.runs.judgement import claims_of_today, judged_again
from kvprobe.runs.registration import CLAIMS, is_news, log_entries, told_to_the_log
from kvprobe.runs.results import CONFIG, ROWS, SUMMARY, UNSIGNED, RunResult, find_runs, load_result
from kvprobe.runs.store import LOG, SHORT_HASH, json_bytes, parquet_bytes, signed, write_atomically

_COLOURS = 64
_DRAWN_AGAIN = ("*.png", "*.svg", "*.md")
_OF_A_MACHINE = ("host", "process")


def release(results_dir: str | Path) -> list[RunResult]:
    """Write finished runs again in their light form, in place.

    Claims are those that the experiment's file makes today, judged from the rows; nothing is measured. The folder is
    called by today's hash. A summary keeps the effects that claims are about, since rows give the others again; rows
    are compressed without loss; figures and reports of single runs go, and those of sections stay, with few colours;
    logs name no host.

    Args:
        results_dir: of all results, or of one run.

    Returns:
        The runs as they were judged, with all effects.

    Raises:
        StoreError: there is no finished run, one was changed since, or a file cannot be read or written.
    """
    root = Path(results_dir)
    folders = [root] if (root / SUMMARY).is_file() else find_runs(root)
    if not folders:
        raise StoreError(f"{root} holds no finished run; run an experiment first, or give another folder.")
    try:
        runs = [_lightened(folder) for folder in folders]
        (root / "report.md").unlink(missing_ok=True)
        lighten_figures(root)
    except (OSError, ValueError) as error:
        raise StoreError(f"{root} cannot be written in its light form ({error}).") from error
    return runs


def lighten_figures(root: Path) -> None:
    """Sections' figures with few colours, and none as SVG."""
    for figure in root.glob("section*.png"):
        write_atomically(figure, light_png(figure.read_bytes()))
    for figure in root.glob("section*.svg"):
        figure.unlink()


def light_png(data: bytes) -> bytes:
    """A figure with few colours; the text it carries is kept."""
    with Image.open(io.BytesIO(data)) as image:
        if image.mode == "P":
            return data
        text, sink = PngInfo(), io.BytesIO()
        for key, value in image.info.items():
            if isinstance(key, str) and isinstance(value, str):
                text.add_text(key, value)
        drawn = image.convert("RGB").quantize(_COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        drawn.save(sink, "PNG", optimize=True, pnginfo=text)
    return sink.getvalue()


def _lightened(folder: Path) -> RunResult:
    """Write the run in its light form."""
    stored = load_result(folder)
    if stored.altered not in ("", UNSIGNED):
        raise StoreError(f"{folder}: {stored.altered}")
    _lighten_log(folder / LOG, stored.config.claims, claims_of_today(stored.config))
    result = judged_again(stored)
    rows = parquet_bytes(_of_experiment(pq.read_table(folder / ROWS), result.hash))
    write_atomically(folder / SUMMARY, json_bytes(signed(result.to_record(light=True), rows)))
    write_atomically(folder / CONFIG, result.config.to_yaml().encode())
    write_atomically(folder / ROWS, rows)
    for pattern in _DRAWN_AGAIN:
        for file in folder.glob(pattern):
            file.unlink()
    return replace(result, folder=folder.rename(folder.parent / result.hash[:SHORT_HASH]), altered="")


def _lighten_log(log: Path, then: Sequence[Claim], now: Sequence[Claim]) -> None:
    """Leave out what names a machine; have the log tell the claims of a run by an earlier version."""
    entries = log_entries(log)
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    if not any(entry["event"] == CLAIMS for entry in entries):
        began = entries[0]["time"] if entries else time
        entries.insert(0, {"time": began, "event": CLAIMS, "claims": told_to_the_log(then)})
    if is_news(now, entries):
        entries.append({"time": time, "event": CLAIMS, "claims": told_to_the_log(now)})
    write_atomically(log, "".join(json.dumps(_light(entry), sort_keys=True) + "\n" for entry in entries).encode())


def _of_experiment(rows: pa.Table, experiment: str) -> pa.Table:
    """Rows that name the experiment by its hash of today."""
    if "experiment" not in rows.column_names:
        return rows
    place = rows.column_names.index("experiment")
    return rows.set_column(place, "experiment", pa.array([experiment] * rows.num_rows))


def _light(entry: dict[str, Any]) -> dict[str, Any]:
    machine = {key: value for key, value in entry.get("machine", {}).items() if key not in _OF_A_MACHINE}
    return {**entry, **({"machine": machine} if machine else {})}
