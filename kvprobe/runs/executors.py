"""Where models are loaded and cells computed: in this process, or in workers beside it.

An executor measures tasks, one model of one experiment each, and lends every task a crew: the workers that hold its
model. Which executor it is, and how many workers there are, changes no byte of the results.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from kvprobe.runs import events
from kvprobe.runs.preparation import Plan
from kvprobe.runs.results import Failure, ModelOutcome
from kvprobe.runs.store import Store
from kvprobe.runs.subjects import SubjectCache, SubjectLoader

RETRIES = 2
"""How often a call is made again whose worker was lost."""
LOST = f"Its worker was lost {RETRIES + 1} times, perhaps because memory ran out; finished cells are kept."

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class ModelTask:
    """One model of one experiment, measured into `store`."""

    plan: Plan
    model: str
    store: Store


@dataclass(frozen=True)
class TaskOutcome:
    """What a task gave after so many seconds."""

    result: ModelOutcome | Failure
    seconds: float


class Crew(Protocol):
    """The workers that hold one model."""

    @property
    def size(self) -> int:
        """Calls they can do at the same time."""
        ...

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work(load_subject, *arguments)` returns or raises in one of the workers.

        Args:
            work: a function of a module; its first argument gives a loaded model by its name.
            arguments: may be pickled.

        Raises:
            WorkerLostError: its worker was lost again and again, or no worker can be had.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Wait, or raise `StoppedError` as soon as the run is stopped."""
        ...


Measure = Callable[[ModelTask, Crew, events.Listener], TaskOutcome]
Tell = Callable[[ModelTask, events.Event], None]
Outcomes = Generator[tuple[ModelTask, TaskOutcome], None, None]


class Executor(Protocol):
    """Measures tasks somewhere; results do not depend on where."""

    jobs: int

    def run(self, measure: Measure, tasks: Sequence[ModelTask], emit: Tell) -> Outcomes:
        """Yield every task with its outcome as soon as it is there; leaving the iterator ends all workers at once.

        Args:
            measure: the work on a task, which never raises an `Exception`.
            tasks: to be measured.
            emit: told of all events of each task, in this thread.
        """
        ...


@dataclass
class InProcessExecutor:
    """One task after the other in this process, which is its own crew."""

    load_subject: SubjectLoader
    jobs: int = 1
    size: int = 1
    _subjects: SubjectCache = field(init=False)

    def __post_init__(self) -> None:
        self._subjects = SubjectCache(self.load_subject)

    def run(self, measure: Measure, tasks: Sequence[ModelTask], emit: Tell) -> Outcomes:
        """Yield every task with its outcome, in order."""
        for task in tasks:
            yield task, measure(task, self, partial(emit, task))

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns or raises."""
        return work(self._subjects, *arguments)

    def wait(self, seconds: float) -> None:
        """Wait; Ctrl-C raises here."""
        time.sleep(seconds)


class StoppedError(BaseException):
    """The run was interrupted; it passes whatever handles errors of the work itself."""


class WorkerExecutor(ABC):
    """Base of executors whose workers are beside this process; threads of this one wait for them.

    Args:
        jobs: tasks measured at the same time.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.stopped = threading.Event()

    def refuse_if_stopped(self, wait: float = 0.0) -> None:
        """Raise `StoppedError` where the run was stopped, or is within so many seconds."""
        if self.stopped.wait(wait):
            raise StoppedError

    @abstractmethod
    def lanes(self, tasks: Sequence[ModelTask]) -> list[list[ModelTask]]:
        """The tasks, each list of them of one model and to be measured in its order by one crew."""

    @abstractmethod
    def crew(self, model: str) -> AbstractContextManager[Crew]:
        """A crew for the model inside the block; waits until there is one."""

    @abstractmethod
    def stop(self) -> None:
        """End all workers, whatever they do; what waits for them raises `StoppedError`."""

    def run(self, measure: Measure, tasks: Sequence[ModelTask], emit: Tell) -> Outcomes:
        """Yield every task with its outcome as soon as it is there; leaving the iterator ends all workers at once."""
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threads = ThreadPoolExecutor(self.jobs, "kvprobe")
        try:
            for lane in self.lanes(tasks):
                threads.submit(self._measure, measure, lane, told).add_done_callback(told.put)
            left = len(tasks)
            while left:
                match told.get():
                    case Future() as ended:
                        ended.result()
                    case task, TaskOutcome() as outcome:
                        left -= 1
                        yield task, outcome
                    case task, event:
                        emit(task, event)
        finally:
            self.stop()
            threads.shutdown(cancel_futures=True)

    def _measure(self, measure: Measure, lane: Sequence[ModelTask], told: queue.SimpleQueue[Any]) -> None:
        with self.crew(lane[0].model) as crew:
            for task in lane:
                told.put((task, measure(task, crew, partial(_put, told, task))))


def _put(told: queue.SimpleQueue[Any], task: ModelTask, event: events.Event) -> None:
    told.put((task, event))


def spread(crew: Crew, work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Do the work, in this process, on every item; what it raises is raised here.

    As many items are under way as the crew can do at the same time. Where that is one, they are taken in order and in
    this thread.
    """
    if crew.size == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(crew.size, "cell") as threads:
        under_way = [threads.submit(work, item) for item in items]
        try:
            for future in as_completed(under_way):
                future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
