"""Runs an experiment: cell by cell, resumable at any point, to effects and verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from kvprobe.errors import AlignmentError, ConfigError, KvprobeError, StoreError, UnknownNameError
from kvprobe.probes.base import Probe
from kvprobe.runs import events, provenance
from kvprobe.runs.claims import Verdict, adjust, judge, not_applicable
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.executors import Cell, Executor, InProcessExecutor
from kvprobe.runs.gate import GateReport, apply_gate
from kvprobe.runs.preparation import (
    Preparation,
    cell_provenance,
    check_model_names,
    labelled,
    make_cells,
    make_probe,
    make_task,
    prepare,
    prompt_pairs,
)
from kvprobe.runs.results import CONFIG, ROWS, SUMMARY, ModelResult, RunResult, Status
from kvprobe.runs.store import DamagedCellError, Store, concatenated, table_of
from kvprobe.stats import Effect
from kvprobe.tasks.pairs import PromptPair

# These are about the request, not about one cell: every cell would fail alike, so the run ends.
_FATAL = (ConfigError, UnknownNameError, StoreError)
SubjectLoader = Callable[[str], Any]


@dataclass(frozen=True)
class CellOutcome:
    """What measuring a cell gave: rows, or the one sentence why not."""

    rows: tuple[dict[str, Any], ...] = ()
    failure: str | None = None


@dataclass
class _Run:
    """State of a run under way."""

    config: ExperimentConfig
    probe: Probe
    pairs: list[PromptPair]
    store: Store
    executor: Executor
    load_subject: SubjectLoader
    emit: events.Listener
    pace: events.Pace
    finished: int = 0
    tables: list[pa.Table] = field(default_factory=list)


@dataclass(frozen=True)
class _Measure:
    """The work on one cell."""

    probe: Probe
    subject: Any
    started: Callable[[], None]
    progress: Callable[[Cell, int, int], None]

    def __call__(self, cell: Cell) -> CellOutcome:
        self.started()
        try:
            rows = self.probe.measure(self.subject, cell.pairs, lambda done, total: self.progress(cell, done, total))
            labels = labelled(rows, cell)
            table_of(labels)  # refuses what is not a number before anything is written
        except _FATAL:
            raise
        except KvprobeError as error:
            return CellOutcome(failure=str(error))
        return CellOutcome(tuple(labels))


def run_experiment(
    config: ExperimentConfig,
    *,
    results_dir: str | Path = "results",
    executor: Executor | None = None,
    on_event: events.Listener = events.ignore,
    load_subject: SubjectLoader | None = None,
) -> RunResult:
    """Run an experiment, or what is left of it.

    Finished cells are read from the store. A cell or a model that fails leaves one sentence and the others are
    kept. On Ctrl-C the KeyboardInterrupt goes on to the caller after a `RunInterrupted` event.

    Args:
        config: the experiment.
        results_dir: root of all results.
        executor: where cells are computed; in this process by default.
        on_event: called with every `kvprobe.runs.events.Event`.
        load_subject: in place of `kvprobe.models.loader.load_subject`.

    Raises:
        ConfigError: probe, task or a claim does not fit the experiment's file.
        UnknownNameError: of a probe, task or model, with the nearest names.
        AlignmentError: a user's own prompt is not aligned.
        StoreError: the results folder cannot be written.
    """
    if load_subject is None:
        check_model_names(config)
    run = _begin(config, results_dir, executor, on_event, load_subject or _default_loader())
    started = time.monotonic()
    try:
        models = [_run_model(run, number) for number in range(len(config.models))]
    except KeyboardInterrupt:
        _log(run, "interrupted")
        on_event(events.RunInterrupted(run.finished, int(run.pace.total)))
        raise
    result = _conclude(run, models)
    seconds = time.monotonic() - started
    _log(run, "finished", seconds=round(seconds, 3))
    on_event(events.RunFinished(str(run.store.folder), seconds))
    return result


def _begin(
    config: ExperimentConfig,
    results_dir: str | Path,
    executor: Executor | None,
    on_event: events.Listener,
    load_subject: SubjectLoader,
) -> _Run:
    probe = make_probe(config)
    pairs = prompt_pairs(make_task(config), config)
    blocks = -(-len(pairs) // config.block_size)
    run = _Run(
        config=config,
        probe=probe,
        pairs=pairs,
        store=Store(results_dir, config.name, config.hash),
        executor=executor or InProcessExecutor(),
        load_subject=load_subject,
        emit=on_event,
        pace=events.Pace(total=float(blocks * len(config.models))),
    )
    run.store.write_text(CONFIG, config.to_yaml())
    _log(run, "started", profile=config.profile, source=config.source, machine=provenance.machine())
    folder, cells = str(run.store.folder), blocks * len(config.models)
    on_event(events.RunStarted(config.name, config.hash, folder, len(config.models), len(pairs), cells))
    return run


def _run_model(run: _Run, number: int) -> ModelResult:
    name, config = run.config.models[number], run.config
    planned = -(-len(run.pairs) // config.block_size)
    run.emit(events.ModelStarted(name, number + 1, len(config.models)))
    try:
        prepared = prepare(name, run.pairs, config, run.load_subject)
    except (*_FATAL, AlignmentError):
        raise
    except KvprobeError as error:
        run.pace.skip(planned)
        return _model_finished(run, ModelResult(name, Status.FAILED, str(error), failures=(str(error),)))
    cells = make_cells(prepared, run.probe, config)
    run.pace.skip(planned - len(cells))
    tables, pending = _stored(run, cells)
    run.finished += len(tables)
    run.emit(events.ModelReady(name, len(prepared.pairs), prepared.unaligned, len(cells), len(tables)))
    failures = _measure_pending(run, prepared, pending, tables)
    ordered = {cell.key: tables[cell.key] for cell in cells if cell.key in tables}
    lost = sum(len(cell.pairs) for cell in cells if cell.key not in tables)
    return _model_finished(run, _summarise(run, prepared, ordered, failures, lost))


def _stored(run: _Run, cells: Sequence[Cell]) -> tuple[dict[str, pa.Table], list[Cell]]:
    """Tables of the finished cells by key, and the cells that remain."""
    tables: dict[str, pa.Table] = {}
    pending = []
    for cell in cells:
        try:
            stored = run.store.load(cell.key)
        except DamagedCellError as error:
            _log(run, "damaged", cell=cell.key)
            run.emit(events.Warned(str(error)))
            stored = None
        if stored is None:
            pending.append(cell)
        else:
            tables[cell.key] = stored.table
            run.pace.skip(1)
    return tables, pending


def _measure_pending(
    run: _Run, prepared: Preparation, pending: Sequence[Cell], tables: dict[str, pa.Table]
) -> list[str]:
    """Measure and store the cells that remain, adding to `tables`. Returns the failures."""
    failures = []

    def progress(cell: Cell, done: int, total: int) -> None:
        part = done / total if total else 0.0
        left = run.pace.seconds_left(part)
        run.emit(events.Progress(cell.model, cell.block, run.pace.fraction(part), left))

    work = _Measure(run.probe, prepared.subject, run.pace.begin, progress)
    for cell, outcome in run.executor.run(work, pending):
        seconds = run.pace.end()
        if outcome.failure is not None:
            failures.append(f"Block {cell.block}: {outcome.failure}")
            _log(run, "failed", cell=cell.key, message=outcome.failure)
            run.emit(events.CellFailed(cell.model, cell.block, outcome.failure))
        else:
            stored = run.store.save(cell.key, outcome.rows, cell_provenance(cell, prepared, run.config))
            tables[cell.key] = stored.table
            run.finished += 1
            _log(run, "cell", cell=cell.key, model=cell.model, block=cell.block, seconds=round(seconds, 3))
            run.emit(events.CellFinished(cell.model, cell.block, cell.key, stored.table.num_rows, seconds))
        run.emit(events.Progress(cell.model, cell.block, run.pace.fraction(), run.pace.seconds_left()))
    return failures


def _summarise(
    run: _Run, prepared: Preparation, tables: Mapping[str, pa.Table], failures: Sequence[str], lost: int
) -> ModelResult:
    table = concatenated([_with_cell(table, key) for key, table in tables.items()])
    rows = table.to_pandas() if table.num_columns else pd.DataFrame()
    included, gate = apply_gate(
        rows,
        run.config.gate,
        run.config.statistics,
        generated=len(run.pairs),
        unaligned=prepared.unaligned,
        failed=lost,
    )
    if table.num_rows:
        run.tables.append(table.append_column("included", pa.array(included.tolist(), type=pa.bool_())))
    effects = _effects(run, rows[included], gate) if gate.passed else []
    status = Status.FAILED if failures else Status.MEASURED if gate.passed else Status.NOT_APPLICABLE
    return ModelResult(
        name=prepared.name,
        status=status,
        reason=_reason(gate, prepared, failures),
        identity=prepared.identity,
        gate=gate,
        effects=tuple(effects),
        failures=tuple(failures),
        cells=tuple(tables),
    )


def _effects(run: _Run, rows: pd.DataFrame, gate: GateReport) -> list[Effect]:
    summarised = run.probe.summarise(rows.reset_index(drop=True), run.config.statistics)
    # The probe never sees the pairs that the gate left out, but every effect must tell of them.
    return [replace(effect, excluded=effect.excluded + gate.excluded) for effect in summarised]


def _reason(gate: GateReport, prepared: Preparation, failures: Sequence[str]) -> str:
    parts = []
    if failures:
        parts.append(f"{len(failures)} of its cells failed. {failures[0]}")
    parts.append(gate.reason)
    if prepared.unaligned and gate.measured:
        parts.append(f"{prepared.unaligned} of {gate.generated} pairs do not align with its tokenizer.")
    return " ".join(parts)


def _model_finished(run: _Run, result: ModelResult) -> ModelResult:
    _log(run, "model", model=result.name, status=str(result.status), message=result.reason)
    run.emit(events.ModelFinished(result.name, str(result.status), result.reason))
    return result


def _conclude(run: _Run, models: Sequence[ModelResult]) -> RunResult:
    config = run.config
    table = concatenated(run.tables)
    if table.num_rows:
        experiment = pa.array([config.hash] * table.num_rows)
        table = table.add_column(0, "experiment", experiment)
    run.store.write_table(ROWS, table)
    result = RunResult(
        config=config,
        hash=config.hash,
        folder=run.store.folder,
        models={model.name: model for model in models},
        verdicts=tuple(_verdicts(config, models)),
        provenance={
            "code": provenance.code_version(),
            "packages": provenance.package_versions(),
            "source": provenance.source_hash(),
            "threads": provenance.threads(),
        },
    )
    run.store.write_json(SUMMARY, result.to_record())
    return result


def _verdicts(config: ExperimentConfig, models: Sequence[ModelResult]) -> list[Verdict]:
    verdicts = []
    for claim in config.claims:
        for model in models:
            if claim.models and model.name not in claim.models:
                continue
            if model.status is Status.MEASURED:
                verdicts.append(judge(claim, model.name, model.effects))
            else:
                verdicts.append(not_applicable(claim, model.name, model.reason))
    return adjust(verdicts)


def _with_cell(table: pa.Table, key: str) -> pa.Table:
    return table.append_column("cell", pa.array([key] * table.num_rows, type=pa.string()))


def _log(run: _Run, what: str, **details: Any) -> None:
    run.store.log({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": what, **details})


def _default_loader() -> SubjectLoader:
    from kvprobe.models.loader import load_subject

    loader: SubjectLoader = load_subject
    return loader
