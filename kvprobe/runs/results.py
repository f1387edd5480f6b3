"""A run's results in memory, and read back from its folder."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from kvprobe.errors import KvprobeError, StoreError, UnknownNameError
from kvprobe.runs.claims import Verdict
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.gate import GateReport
from kvprobe.runs.records import StoredEffect
from kvprobe.stats import Effect
from kvprobe.viewing import Viewable

SUMMARY = "summary.json"
ROWS = "rows.parquet"
CONFIG = "config.yaml"
LOG = "log.jsonl"


class Status(StrEnum):
    """What became of a model in a run."""

    MEASURED = "measured"
    """It passed the gate; its effects count."""
    NOT_APPLICABLE = "not applicable"
    """It fails the inclusion gate; no effects are given."""
    FAILED = "failed"
    """It could not be loaded, or some of its cells could not be measured."""


@dataclass(frozen=True)
class ModelResult(Viewable):
    """All that a run found on one model.

    Args:
        reason: one sentence on the status: gate and attrition, or what failed.
        identity: as the model loader gives it; empty when it could not be loaded.
        gate: `None` when nothing was measured.
        effects: what the probe summarised; empty unless the gate was passed. With `FAILED`, of what was kept.
        failures: one sentence for every cell that failed.
        cells: keys of the finished cells, in order.
    """

    name: str
    status: Status
    reason: str
    identity: dict[str, Any] = field(default_factory=dict)
    gate: GateReport | None = None
    effects: tuple[StoredEffect, ...] = ()
    failures: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()

    def effect(self, name: str) -> Effect:
        """The effect called `name`.

        Raises:
            UnknownNameError: with the nearest names.
        """
        by_name = {effect.name: effect for effect in self.effects}
        if name not in by_name:
            raise UnknownNameError("effect", name, by_name)
        return by_name[name]


@dataclass(frozen=True)
class ModelOutcome:
    """What became of a model, and the rows of its cells with `cell` and `included`."""

    result: ModelResult
    rows: pa.Table


@dataclass(frozen=True)
class Failure:
    """Why an experiment has no result: one sentence, and the traceback where it is a bug."""

    experiment: str
    message: str
    details: str = ""
    error: Exception | None = field(default=None, compare=False, repr=False)


def failure_of(experiment: str, error: Exception) -> Failure:
    """What is told of an error: what kvprobe raises on purpose is a sentence, anything else keeps its traceback."""
    if isinstance(error, KvprobeError):
        return Failure(experiment, str(error), error=error)
    details = "".join(traceback.format_exception(error))
    return Failure(experiment, f"{type(error).__name__}: {error}", details, error)


@dataclass(frozen=True)
class RunResult(Viewable):
    """A finished run.

    Args:
        config: the experiment as it was run.
        hash: of the experiment.
        folder: that holds all of it.
        models: by name, in the experiment's order.
        verdicts: one for each claim and model, p values adjusted.
        provenance: code commit and dirty flag, package versions, seed, threads.
    """

    config: ExperimentConfig
    hash: str
    folder: Path
    models: dict[str, ModelResult]
    verdicts: tuple[Verdict, ...]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def effects(self) -> dict[str, list[Effect]]:
        """Effects by model; a model that failed the gate has none."""
        return {name: list(result.effects) for name, result in self.models.items()}

    @property
    def failed(self) -> bool:
        """Whether some model or cell could not be measured: the exit code is then not 0."""
        return any(result.status is Status.FAILED for result in self.models.values())

    def rows(self) -> pd.DataFrame:
        """All rows of all models, with `included` telling which count."""
        return read_rows(self.folder)

    def __repr__(self) -> str:
        told = [f"{verdict.model}: {verdict.statement}: {verdict.outcome}" for verdict in self.verdicts]
        return "\n".join([f"RunResult({self.config.name} in {self.folder}: {', '.join(self.models)})", *told])

    def to_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "experiment": self.config.name,
            "hash": self.hash,
            "profile": self.config.profile,
            "source": self.config.source,
            "config": self.config.model_dump(mode="json", exclude={"source", "profile"}),
            "models": _MODELS.dump_python(tuple(self.models.values()), mode="json"),
            "verdicts": _VERDICTS.dump_python(self.verdicts, mode="json"),
            "provenance": self.provenance,
        }


_MODELS = TypeAdapter(tuple[ModelResult, ...])
_VERDICTS = TypeAdapter(tuple[Verdict, ...])


def load_result(folder: str | Path) -> RunResult:
    """The result in an experiment's folder (`results/<experiment>/<hash>`).

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    path = Path(folder)
    try:
        record = json.loads((path / SUMMARY).read_bytes())
        config = ExperimentConfig.model_validate(
            {**record["config"], "source": record["source"], "profile": record["profile"]}
        )
        models = _MODELS.validate_python(record["models"])
        verdicts = _VERDICTS.validate_python(record["verdicts"])
    except FileNotFoundError as error:
        raise StoreError(f"{path} holds no finished run (no {SUMMARY}); run the experiment first.") from error
    except OSError as error:
        raise StoreError(f"{path / SUMMARY} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path / SUMMARY} is damaged; delete it and run the experiment again.") from error
    by_name = {model.name: model for model in models}
    return RunResult(config, record["hash"], path, by_name, verdicts, record["provenance"])


def read_rows(folder: str | Path) -> pd.DataFrame:
    """All rows of the run in `folder`.

    Raises:
        StoreError: they are not there or cannot be read.
    """
    path = Path(folder) / ROWS
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read; run the experiment again, finished cells are kept.") from error
    frame: pd.DataFrame = table.to_pandas()
    return frame


def find_runs(results_dir: str | Path, experiment: str | None = None) -> list[Path]:
    """Folders of finished runs under `results_dir`, oldest first."""
    found = Path(results_dir).glob(f"{experiment or '*'}/*/{SUMMARY}")
    return [file.parent for file in sorted(found, key=lambda file: (file.stat().st_mtime_ns, str(file)))]
