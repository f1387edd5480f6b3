"""Models measured on a Ray cluster.

A worker is an actor that keeps its model loaded from one cell to the next and from one experiment to the next. It
hands its cells to this process, which alone writes results: workers need no access to the results folder. When a
worker or its node is lost, Ray starts it again elsewhere and runs again the one cell that it was measuring.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kvprobe.errors import ConfigError, UnsupportedError, WorkerLostError
from kvprobe.runs import provenance
from kvprobe.runs.capacity import limit_threads
from kvprobe.runs.executors import LOST, RETRIES, Measure, ModelTask, Outcomes, Tell, WorkerExecutor
from kvprobe.runs.ray_resources import demand, needs_of, places_on, told
from kvprobe.runs.subjects import SubjectCache, SubjectLoader

PATIENCE = 60.0
"""Seconds that a model waits for a node which can hold it, after such a node was lost."""
_LOOK_ROUND = 1.0

Answer = TypeVar("Answer")


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
        if start is not None:
            start()
        with suppress(OSError):
            os.chdir(folder)
        limit_threads(threads)
        self._subjects = SubjectCache(load_subject)
        self._misfit = _misfit(versions)

    def ready(self) -> None:
        """Answers once the actor runs."""

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns or raises.

        Raises:
            ConfigError: code or packages are not those of who started the run.
        """
        if self._misfit:
            raise ConfigError(self._misfit)
        return work(self._subjects, *arguments)


class RayExecutor(WorkerExecutor):
    """Each model on actors of its own, as many as its share of the cluster allows.

    Args:
        models: to be measured.
        address: of the cluster, as `ray.init` takes it; `None` for the one Ray finds, else one on this machine.
        threads: each worker computes with.
        load_subject: loads a model by its name; a function of a module.
        start: called first of all in every worker; a function of a module too.
    """

    def __init__(
        self,
        models: Sequence[str],
        address: str | None,
        threads: int,
        load_subject: SubjectLoader,
        start: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(len(set(models)))
        self.models_left = self.jobs
        self.threads = threads
        self._address = address
        self._settings = load_subject, threads, start
        self._crews: list[_Crew] = []

    def run(self, measure: Measure, tasks: Sequence[ModelTask], emit: Tell) -> Outcomes:
        """Yield every task with its outcome as soon as it is there; leaving the iterator ends all workers at once.

        Raises:
            UnsupportedError: Ray is not installed.
            ConfigError: there is no cluster at the address.
        """
        with connected(self._address):
            yield from super().run(measure, tasks, emit)

    def lanes(self, tasks: Sequence[ModelTask]) -> list[list[ModelTask]]:
        """The tasks of each model one after another, so that it is loaded once."""
        by_model: dict[str, list[ModelTask]] = {}
        for task in tasks:
            by_model.setdefault(task.model, []).append(task)
        return list(by_model.values())

    @contextmanager
    def crew(self, model: str) -> Iterator[_Crew]:
        """Actors for the model, which begin when they are needed."""
        crew = _Crew(model, self)
        self._crews.append(crew)
        try:
            yield crew
        finally:
            self.models_left -= 1
            crew.dismiss()

    def stop(self) -> None:
        """Kill all actors."""
        self.stopped.set()
        for crew in self._crews:
            crew.dismiss()

    def begin_worker(self, model: str) -> Any:
        """A new actor for the model; it waits where the cluster has no room now."""
        import ray

        needs = needs_of(model, self.threads)
        options = {
            "num_cpus": needs.num_cpus,
            "num_gpus": needs.num_gpus,
            "memory": needs.memory,
            "resources": dict(needs.custom),
            "max_restarts": -1,
            "max_task_retries": RETRIES,
        }
        return ray.remote(Worker).options(**options).remote(*self._settings, str(Path.cwd()), _versions())


class _Crew:
    """The actors of one model."""

    def __init__(self, model: str, executor: RayExecutor) -> None:
        self._model = model
        self._executor = executor
        self._actors: list[Any] = []
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The model's share of the places where it fits, so that other models are not kept waiting."""
        return max(1, self._places() // max(1, self._executor.models_left))

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns or raises in one of the actors.

        Raises:
            WorkerLostError: its worker was lost again and again, or no node can hold one.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        actor = self._free_actor()
        try:
            reference = actor.do.remote(work, *arguments)
            return self._wait(lambda: ray.get(reference, timeout=_LOOK_ROUND), GetTimeoutError)
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            self._executor.refuse_if_stopped()
            raise WorkerLostError(LOST) from error
        finally:
            self._idle.put((actor, None))

    def wait(self, seconds: float) -> None:
        """Wait, or raise `StoppedError` as soon as the run is stopped."""
        self._executor.refuse_if_stopped(seconds)

    def dismiss(self) -> None:
        """End the actors, whatever they do."""
        import ray

        with self._lock:
            actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)

    def _free_actor(self) -> Any:
        """An actor that has nothing to do: the first that is ready, where all are busy or still beginning."""
        with self._lock:
            self._executor.refuse_if_stopped()
            if self._idle.empty() and len(self._actors) < self.size:
                self._begin()
        while True:
            actor, error = self._wait(lambda: self._idle.get(timeout=_LOOK_ROUND), queue.Empty)
            if error is None:
                return actor
            with self._lock:
                self._actors.remove(actor)
                if not self._actors:
                    raise WorkerLostError(
                        "A worker of the Ray cluster cannot begin; kvprobe must be installed on every node as it is "
                        f"here ({error})."
                    )

    def _begin(self) -> None:
        actor = self._executor.begin_worker(self._model)
        self._actors.append(actor)
        ready = actor.ready.remote().future()
        ready.add_done_callback(lambda began: self._idle.put((actor, began.exception())))

    def _wait(self, look: Callable[[], Answer], nothing: type[Exception]) -> Answer:
        """What `look` finds, again and again, as long as there is a node that could hold a worker."""
        placeless_since = None
        while True:
            self._executor.refuse_if_stopped()
            try:
                return look()
            except nothing:
                now = time.monotonic()
                placeless_since = None if self._count_places() else placeless_since or now
                if placeless_since is not None and now - placeless_since > PATIENCE:
                    self._places()

    def _places(self) -> int:
        """How many workers of this model the cluster could hold if nothing else ran there."""
        import ray

        if places := self._count_places():
            return places
        alive = [node for node in ray.nodes() if node["Alive"]]
        largest = [f"{node['NodeManagerHostname']} has {told(node['Resources'])}" for node in alive]
        needs = needs_of(self._model, self._executor.threads)
        raise WorkerLostError(
            f"{self._model} needs {told(demand(needs))}, and no node of the Ray cluster has that "
            f"({'; '.join(largest[:4])}); add such a node, or change 'resources' in the model's YAML."
        )

    def _count_places(self) -> int:
        import ray

        return places_on(ray.nodes(), needs_of(self._model, self._executor.threads))


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
        f"On node {platform.node()} of the Ray cluster {'; '.join(different)} as where the run was started"
        ", so that results would differ; install the same versions on every node."
    )
