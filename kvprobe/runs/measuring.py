"""One model of one experiment: its cells, measured or found, its gate and its effects."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pandas as pd
import pyarrow as pa

from kvprobe.errors import AlignmentError, ConfigError, KvprobeError, StoreError, UnknownNameError, WorkerLostError
from kvprobe.runs import events
from kvprobe.runs.executors import Cell, Executor
from kvprobe.runs.gate import GateReport, apply_gate, hopeless
from kvprobe.runs.preparation import Plan, Preparation, cell_provenance, labelled, make_cells, prepare
from kvprobe.runs.results import ModelResult, Status
from kvprobe.runs.store import DamagedCellError, Store, concatenated, table_of
from kvprobe.stats import Effect, Sample

# These are about the request, not about one cell: every cell would fail alike, so the experiment ends.
_FATAL = (ConfigError, UnknownNameError, StoreError)
# A model that is refused is refused after this many pairs, or all where there are fewer; one that decides the first
# few rightly is not held up.
_PREVIEWED = 8
_PROMISING = 2
SubjectLoader = Callable[[str], Any]


@dataclass(frozen=True)
class ModelOutcome:
    """What became of a model, and the rows of its cells with `cell` and `included`."""

    result: ModelResult
    rows: pa.Table


@dataclass(frozen=True)
class CellOutcome:
    """What measuring a cell gave: rows, or the one sentence why not."""

    seconds: float
    rows: tuple[dict[str, Any], ...] = ()
    failure: str | None = None


@dataclass(frozen=True)
class _Run:
    plan: Plan
    store: Store
    executor: Executor
    emit: events.Listener


@dataclass(frozen=True)
class _Measure:
    """The work on one cell."""

    plan: Plan
    load_subject: SubjectLoader
    emit: events.Listener

    def __reduce__(self) -> tuple[Any, ...]:
        # Who is told of how far a cell is stays in this process.
        return type(self), (self.plan, self.load_subject, events.ignore)

    def __call__(self, cell: Cell) -> CellOutcome:
        began = time.monotonic()

        def progress(done: int, total: int) -> None:
            self.emit(events.CellAdvanced(cell.model, cell.block, done / total if total else 0.0))

        try:
            labels = labelled(self.plan.probe.measure(self.load_subject(cell.model), cell.pairs, progress), cell)
            table_of(labels)  # refuses what is not a number before anything is written
        except _FATAL:
            raise
        except KvprobeError as error:
            return CellOutcome(time.monotonic() - began, failure=str(error))
        return CellOutcome(time.monotonic() - began, tuple(labels))


def measure_model(
    plan: Plan, name: str, *, store: Store, executor: Executor, load_subject: SubjectLoader, emit: events.Listener
) -> ModelOutcome:
    """Measure what is left of a model and sum it up.

    A cell that fails, or a model that cannot be loaded, leaves one sentence in the result.

    Args:
        plan: the experiment.
        name: of the model.
        store: that finished cells are read from and written to.
        executor: where the model is loaded and its cells are computed.
        load_subject: gives the model by its name there; called again and again, so it keeps what it loaded.
        emit: told of everything.

    Raises:
        ConfigError: probe, task or model do not fit the experiment's file.
        UnknownNameError: there is no such model; with the nearest names.
        AlignmentError: a user's own prompt is not aligned.
        StoreError: the results folder cannot be written.
    """
    models = plan.config.models
    run = _Run(plan, store, executor, emit)
    emit(events.ModelStarted(name, models.index(name) + 1, len(models)))
    try:
        prepared = executor.do(partial(_prepared, plan, name, load_subject))
    except (*_FATAL, AlignmentError):
        raise
    except KvprobeError as error:
        return _failed(run, name, error)
    cells = make_cells(prepared, plan.probe, plan.config)
    tables, pending = _stored(run, cells)
    counts = len(prepared.pairs), prepared.unaligned, len(cells), len(tables)
    emit(events.ModelReady(name, *counts, prepared.peak_bytes))
    try:
        refused = None if tables else executor.do(partial(_refused_early, plan, prepared, load_subject))
    except WorkerLostError as error:
        return _failed(run, name, error)
    if refused is not None:
        return _finished(run, refused)
    failures = _measure_pending(run, prepared, pending, tables, load_subject)
    ordered = {cell.key: tables[cell.key] for cell in cells if cell.key in tables}
    lost = sum(len(cell.pairs) for cell in cells if cell.key not in tables)
    return _finished(run, _summarised(plan, prepared, ordered, failures, lost))


def log_event(store: Store, what: str, **details: Any) -> None:
    """One line of the run log, with the time."""
    store.log({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": what, **details})


def _prepared(plan: Plan, name: str, load_subject: SubjectLoader) -> Preparation:
    """What can be told of the model anywhere; the model itself stays where it was loaded."""
    return replace(prepare(name, plan.pairs, plan.config, load_subject), subject=None)


def _failed(run: _Run, name: str, error: KvprobeError) -> ModelOutcome:
    failed = ModelResult(name, Status.FAILED, str(error), failures=(str(error),))
    return _finished(run, ModelOutcome(failed, pa.table({})))


def _stored(run: _Run, cells: Sequence[Cell]) -> tuple[dict[str, pa.Table], list[Cell]]:
    """Tables of the finished cells by key, and the cells that remain."""
    tables: dict[str, pa.Table] = {}
    pending = []
    for cell in cells:
        try:
            stored = run.store.load(cell.key)
        except DamagedCellError as error:
            log_event(run.store, "damaged", cell=cell.key)
            run.emit(events.Warned(str(error)))
            stored = None
        if stored is None:
            pending.append(cell)
        else:
            tables[cell.key] = stored.table
    return tables, pending


def _measure_pending(
    run: _Run, prepared: Preparation, pending: Sequence[Cell], tables: dict[str, pa.Table], load_subject: SubjectLoader
) -> list[str]:
    """Measure and store the cells that remain, adding to `tables`. Returns the failures."""
    failures = []
    for cell, answer in run.executor.run(_Measure(run.plan, load_subject, run.emit), pending):
        outcome = CellOutcome(0.0, failure=str(answer)) if isinstance(answer, WorkerLostError) else answer
        if outcome.failure is not None:
            failures.append(f"Block {cell.block}: {outcome.failure}")
            log_event(run.store, "failed", cell=cell.key, message=outcome.failure)
            run.emit(events.CellFailed(cell.model, cell.block, outcome.failure))
            continue
        stored = run.store.save(cell.key, outcome.rows, cell_provenance(cell, prepared, run.plan.config))
        tables[cell.key] = stored.table
        seconds = round(outcome.seconds, 3)
        log_event(run.store, "cell", cell=cell.key, model=cell.model, block=cell.block, seconds=seconds)
        run.emit(events.CellFinished(cell.model, cell.block, cell.key, stored.table.num_rows, outcome.seconds))
    return failures


def _refused_early(plan: Plan, prepared: Preparation, load_subject: SubjectLoader) -> ModelOutcome | None:
    """The outcome of a model whose first pairs show that it will not pass the gate; `None` to measure it."""
    if not prepared.pairs:
        return None
    config, rows = plan.config, []
    subject = load_subject(prepared.name)
    if (cause := plan.probe.refusal(subject, prepared.pairs[0])) is not None:
        return _cannot_be_asked(plan, prepared, cause)
    for index, pair in enumerate(prepared.pairs[:_PREVIEWED]):
        seen = plan.probe.preview(subject, pair)
        if seen is None:
            return None
        cluster = config.statistics.cluster
        rows.append({"pair": index, cluster: getattr(pair.scenario, cluster, index), **seen})
        if index + 1 >= _PROMISING and all(row["m_base"] < 0 < row["m_donor"] for row in rows):
            return None
    all_seen = len(rows) == len(prepared.pairs)
    if (len(rows) < _PREVIEWED and not all_seen) or not hopeless(
        rows, config.gate, config.statistics, all_seen=all_seen
    ):
        return None
    _, gate = apply_gate(
        pd.DataFrame(rows), config.gate, config.statistics, generated=len(plan.pairs), unaligned=prepared.unaligned
    )
    early = f"Refused after {len(rows)} of {len(prepared.pairs)} pairs: nothing was measured."
    return _unmeasured(prepared, gate, f"{_reason(gate, prepared, ())} {early}")


def _cannot_be_asked(plan: Plan, prepared: Preparation, cause: str) -> ModelOutcome:
    config, generated = plan.config, len(plan.pairs)
    _, gate = apply_gate(
        pd.DataFrame(), config.gate, config.statistics, generated=generated, unaligned=prepared.unaligned
    )
    return _unmeasured(prepared, replace(gate, reason=cause), f"{cause} Nothing was measured.")


def _unmeasured(prepared: Preparation, gate: GateReport, reason: str) -> ModelOutcome:
    result = ModelResult(prepared.name, Status.NOT_APPLICABLE, reason, identity=prepared.identity, gate=gate)
    return ModelOutcome(result, pa.table({}))


def _summarised(
    plan: Plan, prepared: Preparation, tables: Mapping[str, pa.Table], failures: Sequence[str], lost: int
) -> ModelOutcome:
    config = plan.config
    table = concatenated([_with_cell(table, key) for key, table in tables.items()])
    rows = table.to_pandas() if table.num_columns else pd.DataFrame()
    included, gate = apply_gate(
        rows,
        config.gate,
        config.statistics,
        generated=len(plan.pairs),
        unaligned=prepared.unaligned,
        failed=lost,
    )
    if table.num_rows:
        table = table.append_column("included", pa.array(included.tolist(), type=pa.bool_()))
    result = ModelResult(
        name=prepared.name,
        status=Status.FAILED if failures else Status.MEASURED if gate.passed else Status.NOT_APPLICABLE,
        reason=_reason(gate, prepared, failures),
        identity=prepared.identity,
        gate=gate,
        effects=tuple(_effects(plan, rows[included], gate)) if gate.passed else (),
        failures=tuple(failures),
        cells=tuple(tables),
    )
    return ModelOutcome(result, table)


def _effects(plan: Plan, rows: pd.DataFrame, gate: GateReport) -> list[Effect]:
    sample = Sample.of_model(rows.reset_index(drop=True), plan.config.statistics)
    # The probe never sees the pairs that the gate left out, but every effect must tell of them.
    return [replace(e, excluded=e.excluded + gate.excluded) for e in plan.probe.read_by().read(plan.probe, sample)]


def _reason(gate: GateReport, prepared: Preparation, failures: Sequence[str]) -> str:
    parts = []
    if failures:
        parts.append(f"{len(failures)} of its cells failed. {failures[0]}")
    parts.append(gate.reason)
    if prepared.unaligned and gate.measured:
        parts.append(f"{prepared.unaligned} of {gate.generated} pairs do not align with its tokenizer.")
    elif prepared.unaligned and not prepared.pairs:
        parts.append(prepared.first_misfit)
    return " ".join(parts)


def _finished(run: _Run, outcome: ModelOutcome) -> ModelOutcome:
    result = outcome.result
    log_event(run.store, "model", model=result.name, status=str(result.status), message=result.reason)
    run.emit(events.ModelFinished(result.name, str(result.status), result.reason))
    return outcome


def _with_cell(table: pa.Table, key: str) -> pa.Table:
    return table.append_column("cell", pa.array([key] * table.num_rows, type=pa.string()))
