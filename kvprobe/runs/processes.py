"""Models of experiments measured in several processes at once: same cells, same store, same bytes.

A worker writes every cell it finishes itself, so that nothing is lost with a worker, nor with the process that
started it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import pyarrow as pa

from kvprobe.errors import KvprobeError
from kvprobe.runs import events
from kvprobe.runs.capacity import limit_threads
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.executors import Executor, InProcessExecutor
from kvprobe.runs.measuring import ModelOutcome, SubjectLoader, measure_model
from kvprobe.runs.preparation import make_plan
from kvprobe.runs.results import ModelResult, Status
from kvprobe.runs.store import Store
from kvprobe.runs.subjects import SubjectCache

_subjects: SubjectCache | None = None


@dataclass(frozen=True)
class ModelTask:
    """One model of one experiment, all of which is measured in one process."""

    config: ExperimentConfig
    model: str
    results_dir: str


@dataclass(frozen=True)
class Failure:
    """Why an experiment has no result: one sentence, and the traceback where it is a bug."""

    experiment: str
    message: str
    details: str = ""


@dataclass(frozen=True)
class TaskOutcome:
    """What a task gave, and what it told meanwhile; in this process that was told at once, so `told` is empty."""

    result: ModelOutcome | Failure
    seconds: float
    told: tuple[events.Event, ...] = ()


Outcomes = Generator[tuple[ModelTask, TaskOutcome], None, None]


def failure_of(experiment: str, error: Exception) -> Failure:
    """What is told of an error: what kvprobe raises on purpose is a sentence, anything else keeps its traceback."""
    if isinstance(error, KvprobeError):
        return Failure(experiment, str(error))
    return Failure(experiment, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


def measure_task(
    task: ModelTask, load_subject: SubjectLoader, emit: events.Listener, executor: Executor | None = None
) -> TaskOutcome:
    """Measure one model of one experiment. What is raised becomes a `Failure`: other experiments must go on."""
    began = time.monotonic()
    result: ModelOutcome | Failure
    try:
        plan = make_plan(task.config)
        store = Store(task.results_dir, task.config.name, task.config.hash)
        executor = executor or InProcessExecutor()
        result = measure_model(plan, task.model, store=store, executor=executor, load_subject=load_subject, emit=emit)
    except Exception as error:
        result = failure_of(task.config.name, error)
        emit(events.ModelFinished(task.model, str(Status.FAILED), result.message))
    return TaskOutcome(result, time.monotonic() - began)


def in_this_process(tasks: Sequence[ModelTask], load_subject: SubjectLoader, emit: events.Listener) -> Outcomes:
    """One task after the other, in order."""
    subjects = SubjectCache(load_subject)
    for task in tasks:
        yield task, measure_task(task, subjects, emit)


@dataclass(frozen=True)
class Workers:
    """Processes that measure tasks.

    Args:
        jobs: how many.
        threads: each computes with.
        load_subject: loads a model by its name; a function of a module, since it goes to another process.
        start: called first of all in every worker; a function of a module too.
    """

    jobs: int
    threads: int
    load_subject: SubjectLoader
    start: Callable[[], None] | None = None

    def run(self, tasks: Sequence[ModelTask]) -> Outcomes:
        """Yield every task with its outcome as soon as it is there.

        When a worker is killed, what was under way is tried once more, one by one, so that only a task that kills
        its worker itself fails. Leaving the iterator ends the workers at once.
        """
        left = list(tasks)
        while left:
            try:
                yield from self._pooled(left, self.jobs)
            except BrokenProcessPool:
                # Tasks are begun in order.
                under_way = left[: self.jobs]
                del left[: self.jobs]
                yield from self._one_by_one(under_way)

    def _one_by_one(self, left: list[ModelTask]) -> Outcomes:
        while left:
            try:
                yield from self._pooled(left, 1)
            except BrokenProcessPool:
                culprit = left.pop(0)
                yield culprit, _killed(culprit)

    def _pooled(self, left: list[ModelTask], jobs: int) -> Outcomes:
        """The tasks in one set of workers; each is taken off `left` with its outcome."""
        context = multiprocessing.get_context("spawn")
        lifeline, held = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(
            min(jobs, len(left)),
            mp_context=context,
            initializer=_begin_worker,
            initargs=(lifeline, self.threads, self.load_subject, self.start),
        )
        try:
            futures = {pool.submit(_work, task): task for task in left}
            broken = None
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    # What was finished before the break may come after it here.
                    broken = error
                    continue
                left.remove(futures[future])
                yield futures.pop(future), future.result()
            if broken is not None:
                raise broken
        finally:
            if left:
                held.close()  # the workers leave
            pool.shutdown(cancel_futures=True)
            for end in (held, lifeline):
                end.close()


def _killed(task: ModelTask) -> TaskOutcome:
    reason = "The process that measured it was killed, perhaps for want of memory; finished cells are kept."
    result = ModelResult(task.model, Status.FAILED, reason, failures=(reason,))
    models = task.config.models
    told = (
        events.ModelStarted(task.model, models.index(task.model) + 1, len(models)),
        events.ModelFinished(task.model, str(result.status), reason),
    )
    return TaskOutcome(ModelOutcome(result, pa.table({})), 0.0, told)


def _begin_worker(
    lifeline: Connection, threads: int, load_subject: SubjectLoader, start: Callable[[], None] | None
) -> None:
    global _subjects  # noqa: PLW0603  (a worker of a pool has nowhere else to keep them)
    import signal

    # Ctrl-C reaches all processes of a terminal; the first one decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(lifeline,), daemon=True).start()
    if start is not None:
        start()
    limit_threads(threads)
    _subjects = SubjectCache(load_subject)


def _leave_with(lifeline: Connection) -> None:
    """End this process when the one that started it closes its end of the line, or is no more."""
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)


def _work(task: ModelTask) -> TaskOutcome:
    assert _subjects is not None
    told: list[events.Event] = []
    outcome = measure_task(task, _subjects, told.append)
    # How far a cell was matters only while it is measured.
    return replace(outcome, told=tuple(event for event in told if not isinstance(event, events.CellAdvanced)))
