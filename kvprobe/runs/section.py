"""Several experiments at once, such as all of a section: their models in parallel, their claims judged together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvprobe.runs import events
from kvprobe.runs.capacity import limited_threads, possible_jobs, threads_of_each
from kvprobe.runs.claims import Verdict, adjust_headlines
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.measuring import ModelOutcome, SubjectLoader, log_event
from kvprobe.runs.preparation import Plan, check_model_names, make_plan
from kvprobe.runs.processes import Failure, ModelTask, Outcomes, TaskOutcome, Workers, failure_of, in_this_process
from kvprobe.runs.results import RunResult
from kvprobe.runs.runner import begin, conclude, default_loader
from kvprobe.runs.store import Store

ExecutorName = Literal["processes", "ray"]


@dataclass(frozen=True)
class SectionResult:
    """The finished experiments of a section.

    Args:
        name: such as `section3`.
        results: of the experiments, in the paper's order; p values adjusted within each.
        failures: of the experiments that have no result.
    """

    name: str
    results: tuple[RunResult, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether something could not be measured: the exit code is then not 0."""
        return bool(self.failures) or any(result.failed for result in self.results)

    def verdicts(self) -> list[tuple[RunResult, Verdict]]:
        """The section's registry of claims: all verdicts, those on headline claims with Holm's p over all of them."""
        pairs = [(result, verdict) for result in self.results for verdict in result.verdicts]
        adjusted = adjust_headlines([verdict for _, verdict in pairs])
        return [(result, verdict) for (result, _), verdict in zip(pairs, adjusted, strict=True)]


def section_name(configs: Sequence[ExperimentConfig]) -> str:
    """`section3` where all are of section 3 or of a part of it, such as 3.1; else `experiments`."""
    sections = {config.section.split(".")[0].strip() for config in configs}
    section = sections.pop() if len(sections) == 1 else ""
    return f"section{section}" if section else "experiments"


def sections_of(results: Sequence[RunResult]) -> list[SectionResult]:
    """Finished runs by section, each in order."""
    by_name: dict[str, list[RunResult]] = {}
    for result in sorted(results, key=lambda result: _place(result.config)):
        by_name.setdefault(section_name([result.config]), []).append(result)
    return [SectionResult(name, tuple(of_section)) for name, of_section in by_name.items()]


def in_order(configs: Sequence[ExperimentConfig]) -> list[ExperimentConfig]:
    """By section, then by name, numbers by size: 3.2 before 3.10."""
    return sorted(configs, key=_place)


def run_section(
    configs: Sequence[ExperimentConfig],
    *,
    results_dir: str | Path = "results",
    jobs: int | None = None,
    on_event: events.Listener = events.ignore,
    on_result: Callable[[RunResult], None] | None = None,
    load_subject: SubjectLoader | None = None,
    start_worker: Callable[[], None] | None = None,
    executor: ExecutorName = "processes",
    ray_address: str | None = None,
) -> SectionResult:
    """Run experiments, or what is left of them, and judge their claims together.

    An experiment that fails leaves one sentence and the others go on. Each model of each experiment is measured in
    one process, and models stay loaded there from one experiment to the next. How many processes there are changes
    no byte of the results: the number of threads, which might, does not depend on it.

    Args:
        configs: the experiments.
        results_dir: root of all results.
        jobs: processes that measure at once; by default as many as this machine has cores and memory for.
        on_event: called with every `kvprobe.runs.events.Event`.
        on_result: called with the result of each experiment as soon as it is there.
        load_subject: in place of `kvprobe.models.loader.load_subject`; a function of a module where there are
            several jobs.
        start_worker: called first of all in every process that measures; a function of a module too.
        executor: `processes` of this machine, or workers of a `ray` cluster, which are as many as its resources
            allow and change no byte of the results either.
        ray_address: of the cluster, as `ray.init` takes it; by default the one Ray finds, else one on this machine.

    Raises:
        ConfigError: no Ray cluster answers.
        UnsupportedError: Ray is asked for and not installed.
        UnknownNameError: there is no such model; with the nearest names.
    """
    configs = in_order(list({config.hash: config for config in configs}.values()))
    models = [name for config in configs for name in config.models]
    if load_subject is None:
        for config in configs:
            check_model_names(config)
    possible = possible_jobs(models)
    jobs = len(set(models)) if executor == "ray" else max(1, min(jobs or possible, len(models)))
    threads = threads_of_each(possible)
    loader = load_subject or default_loader()
    with limited_threads(threads):
        name = section_name(configs)
        on_event(events.SectionStarted(name, len(configs), jobs))
        section = _Section(name, configs, str(results_dir), on_event, on_result)
        tasks = section.tasks()
        outcomes: Outcomes
        if executor == "ray":
            from kvprobe.runs.cluster import ClusterWorkers

            outcomes = ClusterWorkers(ray_address, threads, loader, start_worker).run(tasks, section.tracker)
        elif jobs == 1:
            outcomes = in_this_process(tasks, loader, section.tracker)
        else:
            outcomes = Workers(jobs, threads, loader, start_worker).run(tasks)
        return section.measure(outcomes)


@dataclass
class _Experiment:
    """An experiment under way."""

    plan: Plan
    store: Store
    outcomes: dict[str, ModelOutcome] = field(default_factory=dict)
    seconds: float = 0.0


class _Section:
    """A section under way."""

    def __init__(
        self,
        name: str,
        configs: Sequence[ExperimentConfig],
        results_dir: str,
        emit: events.Listener,
        on_result: Callable[[RunResult], None] | None,
    ) -> None:
        self.name, self._emit, self._on_result = name, emit, on_result
        self._count = len(configs)
        self._results_dir = results_dir
        self._experiments: dict[str, _Experiment] = {}
        self._results: dict[str, RunResult] = {}
        self._failures: dict[str, Failure] = {}
        for config in configs:
            self._begin(config)
        self.tracker = events.Tracker(len(self.tasks()), emit)

    def tasks(self) -> list[ModelTask]:
        """All that is to be measured, experiment by experiment."""
        plans = [experiment.plan for experiment in self._experiments.values()]
        return [ModelTask(plan.config, model, self._results_dir) for plan in plans for model in plan.config.models]

    def measure(self, outcomes: Outcomes) -> SectionResult:
        """Take in the outcomes of all tasks, in any order, and conclude each experiment with its last model."""
        with closing(outcomes):
            try:
                for task, outcome in outcomes:
                    self._take(task, outcome)
            except KeyboardInterrupt:
                open_ones = [experiment for key, experiment in self._experiments.items() if key not in self._results]
                for experiment in open_ones:
                    log_event(experiment.store, "interrupted")
                self._emit(events.RunInterrupted(self.tracker.finished, self._cells()))
                raise
        keys = self._experiments
        results = tuple(self._results[key] for key in keys if key in self._results)
        return SectionResult(self.name, results, tuple(self._failures.values()))

    def _begin(self, config: ExperimentConfig) -> None:
        try:
            plan = make_plan(config)
            store = begin(plan, self._results_dir, self._emit)
        except Exception as error:
            self._fail(config, failure_of(config.name, error))
        else:
            self._experiments[config.hash] = _Experiment(plan, store)

    def _take(self, task: ModelTask, outcome: TaskOutcome) -> None:
        for event in outcome.told:
            self.tracker(event)
        experiment = self._experiments[task.config.hash]
        experiment.seconds += outcome.seconds
        if isinstance(outcome.result, Failure):
            if task.config.hash not in self._failures:
                self._fail(task.config, outcome.result, experiment.seconds)
            return
        experiment.outcomes[task.model] = outcome.result
        if len(experiment.outcomes) == len(task.config.models):
            self._conclude(experiment)

    def _conclude(self, experiment: _Experiment) -> None:
        config = experiment.plan.config
        ordered = [experiment.outcomes[model] for model in config.models]
        try:
            result = conclude(experiment.plan, experiment.store, ordered, experiment.seconds, self._emit)
        except Exception as error:
            self._fail(config, failure_of(config.name, error), experiment.seconds)
        else:
            self._results[config.hash] = result
            self._emit(events.ExperimentFinished(config.name, self._finished(), self._count, experiment.seconds))
            if self._on_result is not None:
                self._on_result(result)

    def _fail(self, config: ExperimentConfig, failure: Failure, seconds: float = 0.0) -> None:
        self._failures[config.hash] = failure
        number = self._finished()
        self._emit(events.ExperimentFinished(config.name, number, self._count, seconds, failure.message))

    def _finished(self) -> int:
        return len(self._results) + len(self._failures)

    def _cells(self) -> int:
        plans = [experiment.plan for experiment in self._experiments.values()]
        return sum(plan.cells * len(plan.config.models) for plan in plans)


def _place(config: ExperimentConfig) -> tuple[list[tuple[int, int, str]], str]:
    parts = re.findall(r"\d+|[^\d.]+", config.section)
    # Numbers by their size and before words.
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts], config.name
