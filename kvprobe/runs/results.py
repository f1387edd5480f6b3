"""A run's results in memory, and read back from its folder."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from kvprobe.errors import KvprobeError, StoreError, UnknownNameError
from kvprobe.models.catalogue import Standing, standing
from kvprobe.runs.claims import Verdict, told_by
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.gate import MARGIN_ONLY, GateReport, Grade
from kvprobe.runs.readings import EffectsOfRows, read_effects
from kvprobe.runs.records import StoredEffect
from kvprobe.runs.store import is_signed, read_json
from kvprobe.stats import Effect
from kvprobe.viewing import Viewable

SUMMARY = "summary.json"
ROWS = "rows.parquet"
CONFIG = "config.yaml"
ALTERED = f"{SUMMARY} and {ROWS} of this run do not match, so one was changed since; run it again."
UNSIGNED = f"{SUMMARY} of this run is not signed, so an earlier version wrote it or it was changed; run it again."


class Status(StrEnum):
    """What became of a model in a run."""

    MEASURED = "measured"
    """It passed the gate, by its decisions or on margins alone; its effects count."""
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
        effects: of the probe's reading; empty unless the gate was passed. With `FAILED`, of what was kept.
        failures: one sentence for every cell that failed.
        cells: keys of the finished cells, in order.
    """

    name: str
    status: Status
    reason: str
    identity: dict[str, Any] = field(default_factory=dict)
    gate: GateReport | None = None
    effects: Sequence[StoredEffect] = ()
    failures: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()

    def effect(self, name: str) -> Effect:
        """The effect called `name`.

        Raises:
            UnknownNameError: with the nearest names.
        """
        for effects in (self.stored_effects, self.effects):
            by_name = {effect.name: effect for effect in effects}
            if name in by_name:
                return by_name[name]
        raise UnknownNameError("effect", name, by_name)

    @property
    def margin_only(self) -> bool:
        """Whether it is measured on margins, and no decision turns."""
        return self.gate is not None and self.gate.grade is Grade.MARGIN

    @property
    def told(self) -> str:
        """Its status as it is said, with the grade where it is not that of decisions."""
        return f"{self.status} ({MARGIN_ONLY})" if self.margin_only else str(self.status)

    @property
    def stored_effects(self) -> tuple[Effect, ...]:
        """The effects that are in its summary or were just read; none is read for it."""
        return self.effects.kept if isinstance(self.effects, EffectsOfRows) else tuple(self.effects)


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
        altered: one sentence where summary or rows are not known to be as the run wrote them; else empty.
    """

    config: ExperimentConfig
    hash: str
    folder: Path
    models: dict[str, ModelResult]
    verdicts: tuple[Verdict, ...]
    provenance: dict[str, Any] = field(default_factory=dict)
    altered: str = field(default="", compare=False)

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
        told = [f"{verdict.model}: {verdict.statement}: {verdict.word}" for verdict in self.verdicts]
        return "\n".join([f"RunResult({self.config.name} in {self.folder}: {', '.join(self.models)})", *told])

    def to_record(self, *, light: bool = False) -> dict[str, Any]:
        """Plain values for JSON.

        Args:
            light: keep of the effects only those that claims are about; the others are read from the rows again.
        """
        claimed = {(verdict.model, verdict.effect.name) for verdict in self.verdicts if verdict.effect}
        models = []
        for model in self.models.values():
            kept = model.stored_effects
            left_out = model.effects.left_out if isinstance(model.effects, EffectsOfRows) else 0
            if light:
                left_out += len(kept)
                kept = tuple(effect for effect in kept if (model.name, effect.name) in claimed)
                left_out -= len(kept)
            record = _MODEL.dump_python(replace(model, effects=kept), mode="json")
            models.append({**record, "effects_left_out": left_out} if left_out else record)
        return {
            "experiment": self.config.name,
            "hash": self.hash,
            "profile": self.config.profile,
            "source": self.config.source,
            "config": self.config.model_dump(mode="json", exclude={"source", "profile"}),
            "models": models,
            "verdicts": [_verdict_record(verdict, self.config) for verdict in self.verdicts],
            "provenance": self.provenance,
        }


_MODEL = TypeAdapter(ModelResult)
_VERDICT = TypeAdapter(Verdict)
_TOLD_BY_CLAIM = {"statement", "kind", "source", "paper_value", "paper_matches", "headline", "tells_apart", "shown_in"}


def load_result(folder: str | Path) -> RunResult:
    """The result in an experiment's folder (`results/<experiment>/<hash>`).

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    path = Path(folder)
    try:
        record = read_json((path / SUMMARY).read_bytes())
        config = ExperimentConfig.model_validate(
            {**record["config"], "source": record["source"], "profile": record["profile"]}
        )
        models = {model["name"]: _read_model(model, config, path) for model in record["models"]}
        verdicts = tuple(_read_verdict(one, config, models, _standing_of(one)) for one in record["verdicts"])
    except FileNotFoundError as error:
        raise StoreError(f"{path} holds no finished run (no {SUMMARY}); run the experiment first.") from error
    except OSError as error:
        raise StoreError(f"{path / SUMMARY} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise StoreError(f"{path / SUMMARY} is damaged; delete it and run the experiment again.") from error
    altered = _altered(record, path)
    return RunResult(config, record["hash"], path, models, verdicts, record["provenance"], altered)


def _altered(record: Mapping[str, Any], folder: Path) -> str:
    try:
        rows = (folder / ROWS).read_bytes()
    except OSError:
        return ""  # told by whoever reads them
    if is_signed(record, rows):
        return ""
    return ALTERED if "sha256" in record else UNSIGNED


def _read_model(record: Mapping[str, Any], config: ExperimentConfig, folder: Path) -> ModelResult:
    left_out = record.get("effects_left_out", 0)
    model = _MODEL.validate_python({key: value for key, value in record.items() if key != "effects_left_out"})
    kept = tuple(model.effects)
    again = partial(effects_of_rows, model, config, folder)
    # Summaries of earlier versions do not say which rows an effect was made of.
    incomplete = left_out or any(effect.rows is None for effect in kept)
    return replace(model, effects=EffectsOfRows(kept, left_out, again) if incomplete else kept)


def effects_of_rows(model: ModelResult, config: ExperimentConfig, folder: Path) -> tuple[Effect, ...]:
    """The effects of a model that today's reading makes of a run's rows.

    Raises:
        StoreError: the rows cannot be read.
        UnknownNameError: the run's probe is not installed.
    """
    from kvprobe.runs.preparation import make_probe

    rows = read_rows(folder)
    counting = rows[(rows["model"] == model.name) & rows["included"]]
    return read_effects(make_probe(config), counting, config.statistics, model.gate)


def _verdict_record(verdict: Verdict, config: ExperimentConfig) -> dict[str, Any]:
    """What its claim and its model's effects do not say already; of a withdrawn claim all."""
    record = _VERDICT.dump_python(verdict, mode="json")
    told = _TOLD_BY_CLAIM if any(claim.id == verdict.claim for claim in config.claims) else ()
    own = {key: value for key, value in record.items() if key not in told}
    return {**own, "effect": verdict.effect.name if verdict.effect else None}


def _read_verdict(
    record: Mapping[str, Any], config: ExperimentConfig, models: Mapping[str, ModelResult], beside: Standing
) -> Verdict:
    claim = next((claim for claim in config.claims if claim.id == record["claim"]), None)
    effect = record["effect"]
    if isinstance(effect, str):
        effect = next(one for one in models[record["model"]].stored_effects if one.name == effect)
    told = told_by(claim, record["model"], beside) if claim else {}
    return _VERDICT.validate_python({**record, **told, "effect": effect})


def _standing_of(record: Mapping[str, Any]) -> Standing:
    """As it was when the verdict was made; summaries of earlier versions do not say it."""
    if "tier" in record:
        return Standing(record["tier"], record["paper_model"])
    return _standing_now(record["model"])


_standing_now = cache(standing)


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
    found = [file for file in Path(results_dir).glob(f"*/*/{SUMMARY}") if experiment in (None, file.parent.parent.name)]
    return [file.parent for file in sorted(found, key=lambda file: (file.stat().st_mtime_ns, str(file)))]
