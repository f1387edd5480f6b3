"""Models measured in several processes of this machine at once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from kvprobe.errors import WorkerLostError
from kvprobe.registry import run_plugins
from kvprobe.runs.capacity import limit_threads
from kvprobe.runs.executors import LOST, RETRIES, ModelTask, WorkerExecutor
from kvprobe.runs.subjects import SubjectCache, SubjectLoader

_subjects: SubjectCache | None = None


class ProcessExecutor(WorkerExecutor):
    """Each task in one process; models stay loaded there from one task to the next, as long as memory allows.

    Args:
        jobs: processes.
        threads: each computes with.
        load_subject: loads a model by its name; a function of a module, since it goes to another process.
        start: called first of all in every process; a function of a module too.
    """

    def __init__(
        self, jobs: int, threads: int, load_subject: SubjectLoader, start: Callable[[], None] | None = None
    ) -> None:
        super().__init__(jobs)
        self._workers = [_Worker(self, threads, load_subject, start) for _ in range(jobs)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def lanes(self, tasks: Sequence[ModelTask]) -> list[list[ModelTask]]:
        """Every task for itself: whichever process is free takes the next one."""
        return [[task] for task in tasks]

    @contextmanager
    def crew(self, model: str) -> Iterator[_Worker]:  # noqa: ARG002  (any process can hold any model)
        """One process."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def stop(self) -> None:
        """Kill all processes."""
        self.stopped.set()
        for worker in self._workers:
            worker.stop()


class _Worker:
    """One process, started when it is needed and again when it was killed; a crew."""

    size = 1
    _starting = threading.Lock()

    def __init__(self, executor: ProcessExecutor, *settings: Any) -> None:
        self._executor = executor
        self._settings = settings
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns or raises in the process.

        Raises:
            WorkerLostError: the process was killed, and so were those started in its place.
        """
        # Pickled here and not by the pool, so that what cannot be read in the process is an ordinary error there.
        call = pickle.dumps((work, arguments))
        for lost in itertools.count():
            try:
                return self._running().submit(_do, call).result()
            except BrokenProcessPool as error:
                self._pool = None
                if lost == RETRIES and not self._executor.stopped.is_set():
                    raise WorkerLostError(LOST) from error
        raise AssertionError("it ends with an answer or an error")

    def wait(self, seconds: float) -> None:
        """Wait, or raise `StoppedError` as soon as the run is stopped."""
        self._executor.refuse_if_stopped(seconds)

    def stop(self) -> None:
        """Kill the process; none is started in its place."""
        with self._starting:
            for process in self._processes:
                process.kill()
            pool = self._pool
        if pool is not None:
            pool.shutdown()

    def _running(self) -> ProcessPoolExecutor:
        with self._starting:
            self._executor.refuse_if_stopped()
            if self._pool is None:
                others = set(multiprocessing.active_children())
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=self._settings)
                with _interrupts_held_back():
                    self._pool.submit(os.getpid)
                self._processes = set(multiprocessing.active_children()) - others
            return self._pool


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Processes started inside the block never see Ctrl-C, not even while they import.

    It reaches all processes of a terminal, and the one that started the others decides what becomes of them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(threads: int, load_subject: SubjectLoader, start: Callable[[], None] | None) -> None:
    """Make this process a worker."""
    global _subjects  # noqa: PLW0603  (a process of a pool has nowhere else to keep them)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start()
    limit_threads(threads)
    _subjects = SubjectCache(load_subject)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(call: bytes) -> Any:
    run_plugins()
    work, arguments = pickle.loads(call)
    return work(_subjects, *arguments)
