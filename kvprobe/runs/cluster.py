"""Models of experiments measured on a Ray cluster: same cells, same store, same bytes as in this process.

A worker is an actor that keeps its model loaded from one cell to the next and from one experiment to the next. It
hands its cells to this process, which alone writes results: workers need no access to the results folder. When a
worker or its node is lost, Ray starts it again elsewhere and runs again the one cell that it was measuring.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprobe.errors import ConfigError, KvprobeError, UnsupportedError, WorkerLostError
from kvprobe.models.config import Resources
from kvprobe.runs import events, provenance
from kvprobe.runs.capacity import limit_threads
from kvprobe.runs.executors import Answer, Cell, Outcome
from kvprobe.runs.measuring import SubjectLoader
from kvprobe.runs.processes import ModelTask, Outcomes, TaskOutcome, measure_task
from kvprobe.runs.ray_resources import demand, needs_of, places_on, told
from kvprobe.runs.subjects import SubjectCache

RETRIES = 2
"""How often a cell is measured again whose worker was lost."""
PATIENCE = 60.0
"""Seconds that a model waits for a node which can hold it, after such a node was lost."""
_LOOK_ROUND = 1.0
_LOST = (
    f"Its worker on the Ray cluster was lost {RETRIES + 1} times, perhaps for want of memory; finished cells are kept."
)
_subjects: SubjectCache | None = None


def subject_here(name: str) -> Any:
    """The model called `name`, in a worker."""
    assert _subjects is not None
    return _subjects(name)


class Worker:
    """The actor that does what needs a loaded model.

    Args:
        load_subject: loads a model by its name.
        threads: it computes with.
        start: called first of all.
        folder: the working directory of who started the run, which is this one's too where it exists.
        versions: of code and packages there.
    """

    def __init__(
        self,
        load_subject: SubjectLoader,
        threads: int,
        start: Callable[[], None] | None,
        folder: str,
        versions: Mapping[str, str],
    ) -> None:
        global _subjects  # noqa: PLW0603  (work arrives in a pickle, which cannot carry what is loaded here)
        if start is not None:
            start()
        with suppress(OSError):
            os.chdir(folder)
        limit_threads(threads)
        _subjects = SubjectCache(load_subject)
        self._misfit = _misfit(versions)

    def ready(self) -> None:
        """Answers once the actor runs.

        Raises:
            ConfigError: code or packages are not those of who started the run.
        """
        if self._misfit:
            raise ConfigError(self._misfit)

    def do(self, work: Callable[..., Answer], *arguments: Any) -> Answer:
        """What `work` returns or raises."""
        self.ready()
        return work(*arguments)


@dataclass(frozen=True)
class ClusterWorkers:
    """Workers of a Ray cluster that measure tasks, each model on workers of its own.

    Args:
        address: of the cluster, as `ray.init` takes it; `None` for the one Ray finds, else one on this machine.
        threads: each worker computes with.
        load_subject: loads a model by its name; a function of a module.
        start: called first of all in every worker; a function of a module too.
    """

    address: str | None
    threads: int
    load_subject: SubjectLoader
    start: Callable[[], None] | None = None

    def run(self, tasks: Sequence[ModelTask], emit: events.Listener) -> Outcomes:
        """Yield every task with its outcome as soon as it is there; leaving the iterator ends the workers at once.

        Raises:
            UnsupportedError: Ray is not installed.
            ConfigError: there is no cluster at the address.
        """
        of_models: dict[str, list[ModelTask]] = {}
        for task in tasks:
            of_models.setdefault(task.model, []).append(task)
        told: queue.SimpleQueue[events.Event | tuple[ModelTask, TaskOutcome]] = queue.SimpleQueue()
        with connected(self.address), ThreadPoolExecutor(len(of_models), "model") as threads:
            crews = _Crews(self, len(of_models))
            try:
                for of_model in of_models.values():
                    threads.submit(self._measure, crews, of_model, told)
                left = len(tasks)
                while left:
                    match told.get():
                        case events.Event() as event:
                            emit(event)
                        case task, outcome:
                            left -= 1
                            yield task, outcome
            finally:
                crews.stop()

    def _measure(self, crews: _Crews, tasks: Sequence[ModelTask], told: queue.SimpleQueue[Any]) -> None:
        """All tasks of one model, in order, in a thread of their own, on the same workers."""
        crew = crews.crew(tasks[0].model)
        try:
            for task in tasks:
                told.put((task, measure_task(task, subject_here, told.put, crew)))
        finally:
            crews.dismiss(crew)


class _Crews:
    """The workers of all models."""

    def __init__(self, settings: ClusterWorkers, models: int) -> None:
        self.settings = settings
        self._stopped = threading.Event()
        self._models = models
        self._crews: list[_Crew] = []
        self._lock = threading.Lock()

    def crew(self, model: str) -> _Crew:
        crew = _Crew(model, self)
        with self._lock:
            self._crews.append(crew)
        return crew

    def share(self, places: int) -> int:
        """How many of the places for one model's workers it may take, so that other models are not kept waiting."""
        with self._lock:
            return max(1, places // max(1, self._models))

    def dismiss(self, crew: _Crew) -> None:
        with self._lock:
            self._models -= 1
        crew.dismiss()

    def refuse_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            crews = list(self._crews)
        for crew in crews:
            crew.dismiss()


@dataclass(eq=False)
class _Crew:
    """The workers of one model; an executor."""

    model: str
    crews: _Crews
    _hired: list[Any] = field(default_factory=list)
    _starting: dict[Any, Any] = field(default_factory=dict)
    _idle: list[Any] = field(default_factory=list)

    def do(self, work: Callable[[], Answer]) -> Answer:
        """What `work` returns or raises.

        Raises:
            WorkerLostError: it was lost again and again, or no node can hold one.
        """
        ((_, answer),) = self._spread(work, [()], lambda _: 1)
        if isinstance(answer, WorkerLostError):
            raise answer
        return answer

    def run(
        self, work: Callable[[Cell], Outcome], cells: Sequence[Cell]
    ) -> Iterator[tuple[Cell, Outcome | WorkerLostError]]:
        """Yield every cell with its outcome, or why it has none, as soon as it is there."""
        for (cell,), outcome in self._spread(work, [(cell,) for cell in cells], self.crews.share):
            yield cell, outcome

    def dismiss(self) -> None:
        """End the workers, whatever they do."""
        import ray

        for actor in self._hired:
            ray.kill(actor)
        self._hired, self._starting, self._idle = [], {}, []

    def _spread(
        self, work: Callable[..., Any], items: Sequence[tuple[Any, ...]], wanted: Callable[[int], int]
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Every item with what `work` made of it, computed by whichever worker is free."""
        import ray

        left = deque(items)
        busy: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        try:
            self.crews.refuse_if_stopped()
            shared = ray.put(work)
            self._hire(min(len(items), wanted(self._places())))
            while left or busy:
                while left and self._idle:
                    actor, item = self._idle.pop(), left.popleft()
                    busy[actor.do.remote(shared, *item)] = (actor, item)
                reference = self._first_of([*busy, *self._starting])
                if reference in self._starting:
                    self._begin(reference)
                    continue
                actor, item = busy[reference]
                answer = _answer(reference)
                del busy[reference]
                self._idle.append(actor)
                yield item, answer
        except _NoPlaceError as error:
            for item in [*(item for _, item in busy.values()), *left]:
                yield item, WorkerLostError(str(error))
        finally:
            self._idle.extend(actor for actor, _ in busy.values())

    def _hire(self, workers: int) -> None:
        import ray

        settings, needs = self.crews.settings, self._needs()
        while len(self._hired) < workers:
            actor = (
                ray.remote(Worker)
                .options(
                    num_cpus=needs.num_cpus,
                    num_gpus=needs.num_gpus,
                    memory=needs.memory,
                    resources=dict(needs.custom),
                    max_restarts=-1,
                    max_task_retries=RETRIES,
                )
                .remote(settings.load_subject, settings.threads, settings.start, str(Path.cwd()), _versions())
            )
            self._hired.append(actor)
            self._starting[actor.ready.remote()] = actor

    def _begin(self, reference: Any) -> None:
        actor = self._starting.pop(reference)
        if isinstance(answer := _answer(reference), WorkerLostError):
            self._hired.remove(actor)
            if self._hired:
                return
            raise _NoPlaceError(
                "A worker of the Ray cluster cannot begin; kvprobe must be installed on every node as it is here "
                f"({answer.__cause__})."
            )
        self._idle.append(actor)

    def _first_of(self, references: list[Any]) -> Any:
        """The first reference that has an answer."""
        import ray

        placeless_since = None
        while True:
            self.crews.refuse_if_stopped()
            done, _ = ray.wait(references, timeout=_LOOK_ROUND)
            if done:
                return done[0]
            if places_on(ray.nodes(), self._needs()):
                placeless_since = None
            elif placeless_since is None:
                placeless_since = time.monotonic()
            elif time.monotonic() - placeless_since > PATIENCE:
                self._places()

    def _places(self) -> int:
        """How many workers of this model the cluster could hold if nothing else ran there."""
        import ray

        nodes, needs = ray.nodes(), self._needs()
        if places := places_on(nodes, needs):
            return places
        largest = [f"{node['NodeManagerHostname']} has {told(node['Resources'])}" for node in nodes if node["Alive"]]
        raise _NoPlaceError(
            f"{self.model} needs {told(demand(needs))}, and no node of the Ray cluster has that "
            f"({'; '.join(largest[:4])}); add such a node, or change 'resources' in the model's YAML."
        )

    def _needs(self) -> Resources:
        return needs_of(self.model, self.crews.settings.threads)


class _StoppedError(Exception):
    """The run was interrupted."""


class _NoPlaceError(KvprobeError):
    """No node can hold a worker."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connected to a Ray cluster inside the block; who is connected already stays so.

    Raises:
        UnsupportedError: Ray is not installed.
        ConfigError: there is no cluster at the address.
    """
    # Ray reports its use to its makers unless told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default workers of a cluster that is started here give way to everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError(
            "The executor 'ray' needs Ray, which is not installed; install it with pip install 'kvprobe[distributed]'."
        ) from error
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"No Ray cluster answers at {address or 'the address Ray was given'} ({reason}); start one with "
            "`ray start --head`, or correct --ray-address."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _answer(reference: Any) -> Any:
    """What the work of a worker returned or raises, or the error that the worker was lost."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        lost = WorkerLostError(_LOST)
        lost.__cause__ = error
        return lost


def _versions() -> dict[str, str]:
    """What must be the same everywhere for cells to be the same."""
    return {"kvprobe's source": provenance.source_hash()[:12], **provenance.package_versions()}


def _misfit(versions: Mapping[str, str]) -> str:
    """How this process differs from the one that started the run, as a sentence; empty where it does not."""
    here = _versions()
    different = [f"{name} is {here[name]} and not {there}" for name, there in versions.items() if here[name] != there]
    if not different:
        return ""
    return (
        f"On node {provenance.machine()['host']} of the Ray cluster {'; '.join(different)} as where the run was started"
        ", so that results would differ; install the same versions on every node."
    )
