"""One model of one experiment: its cells, measured or found, its gate and its effects."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import pyarrow as pa
import torch

from kvprobe.engine.prefills import share_prefixes
from kvprobe.errors import (
    AlignmentError,
    ConfigError,
    KvprobeError,
    StoreError,
    UnknownNameError,
    UnsupportedError,
    WorkerLostError,
)
from kvprobe.models.subject import Subject
from kvprobe.probes.base import Probe
from kvprobe.probes.calibration import calibrated, told
from kvprobe.runs import events
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.executors import Crew, ModelTask, TaskOutcome, spread
from kvprobe.runs.gate import GateReport, apply_gate, hopeless
from kvprobe.runs.preparation import Cell, Plan, Preparation, cell_provenance, labelled, make_cells, prepare
from kvprobe.runs.readings import read_effects
from kvprobe.runs.results import ModelOutcome, ModelResult, Status, failure_of
from kvprobe.runs.store import DamagedCellError, concatenated, table_of
from kvprobe.runs.subjects import SubjectLoader
from kvprobe.stats import Effect

# These are about the request, not about one cell: every cell would fail alike, so the experiment ends.
_FATAL = (ConfigError, UnknownNameError, StoreError)
# A model that is refused is refused after this many pairs, or all where there are fewer; one that decides the first
# few rightly is not held up.
_PREVIEWED = 8
_PROMISING = 2
_WAIT = 0.5  # seconds between looks at a cell that another process measures


def measure_task(task: ModelTask, crew: Crew, emit: events.Listener) -> TaskOutcome:
    """Measure what is left of a model of an experiment and sum it up.

    A cell that fails, or a model that cannot be loaded, leaves one sentence in the result. What is wrong with the
    experiment itself becomes a `Failure`: other experiments must go on.

    Args:
        task: the model and the experiment.
        crew: loads the model and computes its cells.
        emit: told of everything.
    """
    began = time.monotonic()
    try:
        outcome = _ModelRun(task, crew, emit).outcome()
    except Exception as error:
        failure = failure_of(task.plan.config.name, error)
        emit(events.ModelFinished(task.model, str(Status.FAILED), failure.message))
        return TaskOutcome(failure, time.monotonic() - began)
    result = outcome.result
    task.store.log("model", model=result.name, status=str(result.status), message=result.reason)
    emit(events.ModelFinished(result.name, str(result.status), result.reason))
    return TaskOutcome(outcome, time.monotonic() - began)


@dataclass(frozen=True)
class _CellOutcome:
    """What measuring a cell gave: rows, or the one sentence why not."""

    seconds: float
    rows: tuple[dict[str, Any], ...] = ()
    failure: str = ""


class _ModelRun:
    """A model of an experiment under way."""

    def __init__(self, task: ModelTask, crew: Crew, emit: events.Listener) -> None:
        self._plan, self._name, self._store = task.plan, task.model, task.store
        self._crew, self._emit = crew, emit
        self._tables: dict[str, pa.Table] = {}
        self._failures: dict[str, str] = {}
        self._damaged: set[str] = set()

    def outcome(self) -> ModelOutcome:
        models = self._plan.config.models
        self._emit(events.ModelStarted(self._name, models.index(self._name) + 1, len(models)))
        try:
            prepared: Preparation = self._crew.do(_prepare, self._plan, self._name)
        except (*_FATAL, AlignmentError):
            raise
        except KvprobeError as error:
            return self._failed(error)
        try:
            return self._measured(prepared)
        except WorkerLostError as error:
            return self._failed(error)

    def _failed(self, error: KvprobeError) -> ModelOutcome:
        failed = ModelResult(self._name, Status.FAILED, str(error), failures=(str(error),))
        return ModelOutcome(failed, pa.table({}))

    def _measured(self, prepared: Preparation) -> ModelOutcome:
        cells = make_cells(prepared, self._plan.probe, self._plan.config)
        pending = [cell for cell in cells if not self._find(cell)]
        counts = len(prepared.pairs), prepared.unaligned, len(cells), len(self._tables)
        self._emit(events.ModelReady(self._name, *counts, prepared.peak_bytes))
        if not self._tables and (refused := self._refused_early(prepared)):
            return refused
        self._measure_all(pending)
        return self._summed_up(prepared, cells)

    def _find(self, cell: Cell) -> bool:
        """Whether the cell is finished; its rows are then kept."""
        try:
            stored = self._store.load(cell.key)
        except DamagedCellError as error:
            if cell.key not in self._damaged:
                self._store.log("damaged", cell=cell.key)
                self._emit(events.Warned(str(error)))
            self._damaged.add(cell.key)
            return False
        if stored is not None:
            self._tables[cell.key] = stored.table
        return stored is not None

    def _measure_all(self, cells: Sequence[Cell]) -> None:
        """Measure and store cells; those that another process is measuring are waited for."""
        elsewhere: list[Cell] = []

        def measure(cell: Cell) -> None:
            if not self._measure_or_find(cell):
                elsewhere.append(cell)

        def wait_for(cell: Cell) -> None:
            while not self._measure_or_find(cell):
                self._crew.wait(_WAIT)

        spread(self._crew, measure, cells)
        if elsewhere:
            count = f"{len(elsewhere)} cells" if len(elsewhere) > 1 else "a cell"
            where = f"{count} of {self._name} into {self._store.folder.parent}"
            self._emit(events.Warned(f"Another process measures {where}; this one waits for it."))
            spread(self._crew, wait_for, elsewhere)

    def _measure_or_find(self, cell: Cell) -> bool:
        """Whether the cell is done with; not while another process measures it."""
        with self._store.claimed(cell.key) as mine:
            if mine and self._find(cell):
                rows = self._tables[cell.key].num_rows
                self._emit(events.CellFinished(cell.model, cell.block, cell.key, rows, 0.0))
            elif mine:
                self._measure(cell)
            return mine

    def _measure(self, cell: Cell) -> None:
        try:
            outcome = self._crew.do(_measure_cell, self._plan.probe, cell, events.HereOnly(self._emit))
        except WorkerLostError as error:
            outcome = _CellOutcome(0.0, failure=str(error))
        if outcome.failure:
            self._failures[cell.key] = f"Block {cell.block}: {outcome.failure}"
            self._store.log("failed", cell=cell.key, message=outcome.failure)
            self._emit(events.CellFailed(cell.model, cell.block, outcome.failure))
            return
        stored = self._store.save(cell.content, outcome.rows, cell_provenance(cell, self._plan.config))
        self._tables[cell.key] = stored.table
        seconds = round(outcome.seconds, 3)
        self._store.log("cell", cell=cell.key, model=cell.model, block=cell.block, seconds=seconds)
        self._emit(events.CellFinished(cell.model, cell.block, cell.key, stored.table.num_rows, outcome.seconds))

    def _refused_early(self, prepared: Preparation) -> ModelOutcome | None:
        """The outcome of a model whose first pairs show that it will not pass the gate; `None` to measure it."""
        if not prepared.pairs:
            return None
        config = self._plan.config
        cause, rows = self._crew.do(_preview, self._plan.probe, config.statistics.cluster, prepared)
        count = {"generated": len(self._plan.pairs), "unaligned": prepared.unaligned}
        if cause:
            _, gate = apply_gate(pd.DataFrame(), config.gate, config.statistics, **count)
            return self._unmeasured(prepared, replace(gate, reason=cause), f"{cause} Nothing was measured.")
        all_seen = len(rows) == len(prepared.pairs)
        if not rows or not hopeless(rows, config.gate, config.statistics, all_seen=all_seen):
            return None
        _, gate = apply_gate(pd.DataFrame(rows), config.gate, config.statistics, **count)
        early = f"Refused after {len(rows)} of {len(prepared.pairs)} pairs: nothing was measured."
        return self._unmeasured(prepared, gate, f"{_reason(gate, prepared, ())} {early}")

    def _unmeasured(self, prepared: Preparation, gate: GateReport, reason: str) -> ModelOutcome:
        status = Status.NOT_APPLICABLE
        return ModelOutcome(ModelResult(self._name, status, reason, prepared.identity, gate), pa.table({}))

    def _summed_up(self, prepared: Preparation, cells: Sequence[Cell]) -> ModelOutcome:
        keys = [cell.key for cell in cells if cell.key in self._tables]
        failures = tuple(self._failures[cell.key] for cell in cells if cell.key in self._failures)
        lost = sum(len(cell.pairs) for cell in cells if cell.key not in self._tables)
        table = concatenated([_with_cell(self._tables[key], key) for key in keys])
        count = {"generated": len(self._plan.pairs), "unaligned": prepared.unaligned, "failed": lost}
        included, gate, effects = self._crew.do(_summarise, self._plan.probe, self._plan.config, table, count)
        if table.num_rows:
            table = table.append_column("included", pa.array(included, type=pa.bool_()))
        result = ModelResult(
            name=self._name,
            status=Status.FAILED if failures else Status.MEASURED if gate.passed else Status.NOT_APPLICABLE,
            reason=_reason(gate, prepared, failures),
            identity=prepared.identity,
            gate=gate,
            effects=effects,
            failures=failures,
            cells=tuple(keys),
        )
        return ModelOutcome(result, table)


def _prepare(load_subject: SubjectLoader, plan: Plan, name: str) -> Preparation:
    """What can be told of the model anywhere; the model itself stays where it was loaded."""
    return replace(prepare(name, plan.pairs, plan.config, load_subject), subject=None)


def _preview(
    load_subject: SubjectLoader, probe: Probe, cluster: str, prepared: Preparation
) -> tuple[str | None, list[dict[str, Any]]]:
    """Why the model cannot be asked at all, and rows for the gate; none where only measuring tells, or all is well."""
    subject, pairs, rows = load_subject(prepared.name), prepared.pairs, []
    if (cause := probe.refusal(subject, pairs[0])) is not None:
        return cause, []
    if isinstance(subject, Subject):
        longest = max(len(prompt.token_ids) for pair in pairs for prompt in (pair.base, pair.donor))
        try:
            subject.check_reach(torch.tensor(longest - 1))
        except UnsupportedError as error:
            return str(error), []
    for index, pair in enumerate(pairs[:_PREVIEWED]):
        with calibrated(subject, prepared.offsets):
            seen = probe.preview(subject, pair)
        if seen is None:
            return None, []
        rows.append({"pair": index, cluster: getattr(pair.scenario, cluster, index), **seen})
        if index + 1 >= _PROMISING and all(row["m_base"] < 0 < row["m_donor"] for row in rows):
            return None, []
    return None, rows


def _measure_cell(load_subject: SubjectLoader, probe: Probe, cell: Cell, emit: Callable[..., None]) -> _CellOutcome:
    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        emit(events.CellAdvanced(cell.model, cell.block, done / total if total else 0.0))

    try:
        subject = load_subject(cell.model)
        if prefixes := {pair.shared_prefix for pair in cell.pairs if pair.shared_prefix}:
            share_prefixes(subject, sorted(prefixes))
        offsets = {int(token): offset for token, offset in cell.content.get("offsets", {}).items()}
        with calibrated(subject, offsets):
            rows = labelled(probe.measure(subject, cell.pairs, progress), cell)
        table_of(rows)  # refuses what is not a number before anything is written
    except _FATAL:
        raise
    except KvprobeError as error:
        return _CellOutcome(time.monotonic() - began, failure=str(error))
    return _CellOutcome(time.monotonic() - began, tuple(rows))


def _summarise(
    _: SubjectLoader, probe: Probe, config: ExperimentConfig, table: pa.Table, count: Mapping[str, int]
) -> tuple[list[bool], GateReport, tuple[Effect, ...]]:
    """Which rows count, the gate's report, and the effects that its grade allows."""
    rows = table.to_pandas() if table.num_columns else pd.DataFrame()
    included, gate = apply_gate(rows, config.gate, config.statistics, **count)
    if not gate.passed:
        return included.tolist(), gate, ()
    effects = read_effects(probe, rows[included], config.statistics, gate)
    return included.tolist(), gate, effects


def _reason(gate: GateReport, prepared: Preparation, failures: Sequence[str]) -> str:
    parts = []
    if failures:
        parts.append(f"{len(failures)} of its cells failed. {failures[0]}")
    parts += [gate.reason, *filter(None, [told(prepared.offsets, prepared.pairs)])]
    if prepared.unaligned and gate.measured:
        parts.append(f"{prepared.unaligned} of {gate.generated} pairs do not align with its tokenizer.")
    elif prepared.unaligned and not prepared.pairs:
        parts.append(prepared.first_misfit)
    return " ".join(parts)


def _with_cell(table: pa.Table, key: str) -> pa.Table:
    return table.append_column("cell", pa.array([key] * table.num_rows, type=pa.string()))
