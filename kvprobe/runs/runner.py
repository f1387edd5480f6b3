"""Runs experiments, resumable at any point, from their cells to effects and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa

from kvprobe.errors import ConfigError
from kvprobe.runs import events, provenance
from kvprobe.runs.capacity import limited_threads, possible_jobs, threads_of_each
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.executors import Crew, Executor, InProcessExecutor, ModelTask, TaskOutcome
from kvprobe.runs.judgement import judged
from kvprobe.runs.measuring import measure_task
from kvprobe.runs.preparation import Plan, check_model_names, make_plan
from kvprobe.runs.registration import register, registration
from kvprobe.runs.results import (
    CONFIG,
    ROWS,
    SUMMARY,
    Failure,
    ModelOutcome,
    RunResult,
    Status,
    failure_of,
)
from kvprobe.runs.section import SectionResult, in_order, section_name
from kvprobe.runs.store import Store, concatenated, json_bytes, parquet_bytes, signed
from kvprobe.runs.subjects import SubjectLoader

ExecutorName = Literal["processes", "ray"]


def run_experiment(
    config: ExperimentConfig,
    *,
    results_dir: str | Path = "results",
    executor: Executor | None = None,
    on_event: events.Listener = events.ignore,
    load_subject: SubjectLoader | None = None,
) -> RunResult:
    """Run an experiment, or what is left of it, in this process.

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
    section = run_section(
        [config],
        results_dir=results_dir,
        jobs=1,
        executor=executor or "processes",
        on_event=on_event,
        load_subject=load_subject,
    )
    for failure in section.failures:
        if failure.error is not None:
            raise failure.error
    (result,) = section.results
    return result


def run_section(
    configs: Sequence[ExperimentConfig],
    *,
    results_dir: str | Path = "results",
    jobs: int | None = None,
    on_event: events.Listener = events.ignore,
    on_result: Callable[[RunResult], None] | None = None,
    load_subject: SubjectLoader | None = None,
    start_worker: Callable[[], None] | None = None,
    executor: ExecutorName | Executor = "processes",
    ray_address: str | None = None,
) -> SectionResult:
    """Run experiments, or what is left of them, and judge their claims together.

    An experiment that fails leaves one sentence and the others go on. How many processes measure changes no byte of
    the results: the number of threads, which might, does not depend on it.

    Args:
        configs: the experiments.
        results_dir: root of all results.
        jobs: processes that measure at once; by default as many as this machine has cores and memory for. One is
            this process itself.
        on_event: called with every `kvprobe.runs.events.Event`.
        on_result: called with the result of each experiment as soon as it is there.
        load_subject: in place of `kvprobe.models.loader.load_subject`; a function of a module where there are
            several jobs.
        start_worker: called first of all in every process that measures; a function of a module too.
        executor: `processes` of this machine, or workers of a `ray` cluster, which are as many as its resources
            allow; or an executor of one's own.
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
    threads = threads_of_each(possible)
    jobs = max(1, min(jobs or possible, len(models)))
    loader = load_subject or default_loader()
    if executor == "ray":
        from kvprobe.runs.cluster import RayExecutor

        executor = RayExecutor(models, ray_address, threads, loader, start_worker)
    elif executor == "processes" and jobs == 1:
        executor = InProcessExecutor(loader)
    elif executor == "processes":
        from kvprobe.runs.processes import ProcessExecutor

        executor = ProcessExecutor(jobs, threads, loader, start_worker)
    with limited_threads(threads):
        name = section_name(configs)
        on_event(events.SectionStarted(name, len(configs), executor.jobs))
        return _Section(name, configs, results_dir, on_event, on_result).measure(executor)


def default_loader() -> SubjectLoader:
    """The loader of kvprobe itself, which takes seconds to import."""
    from kvprobe.models.loader import load_subject

    loader: SubjectLoader = load_subject
    return loader


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
        results_dir: str | Path,
        emit: events.Listener,
        on_result: Callable[[RunResult], None] | None,
    ) -> None:
        self._name, self._emit, self._on_result = name, emit, on_result
        self._count = len(configs)
        self._experiments: dict[str, _Experiment] = {}
        self._results: dict[str, RunResult] = {}
        self._failures: dict[str, Failure] = {}
        for config in configs:
            self._begin(config, results_dir)

    def measure(self, executor: Executor) -> SectionResult:
        """Measure everything that is left, and conclude each experiment with its last model."""
        tasks = [
            ModelTask(experiment.plan, model, experiment.store)
            for experiment in self._experiments.values()
            for model in experiment.plan.config.models
        ]
        tracker = events.Tracker(len(tasks), self._emit)
        with closing(executor.run(self._measure, tasks, tracker)) as outcomes:
            try:
                for task, outcome in outcomes:
                    self._take(task, outcome)
            except KeyboardInterrupt:
                for key, experiment in self._experiments.items():
                    if key not in self._results:
                        experiment.store.log("interrupted")
                self._emit(events.RunInterrupted(tracker.finished, sum(task.plan.cells for task in tasks)))
                raise
        results = tuple(self._results[key] for key in self._experiments if key in self._results)
        return SectionResult(self._name, results, tuple(self._failures.values()))

    def _begin(self, config: ExperimentConfig, results_dir: str | Path) -> None:
        try:
            plan = make_plan(config)
            store = _begin(plan, results_dir, self._emit)
        except Exception as error:
            self._fail(config, failure_of(config.name, error))
        else:
            self._experiments[config.hash] = _Experiment(plan, store)

    def _measure(self, task: ModelTask, crew: Crew, emit: events.Listener) -> TaskOutcome:
        if failure := self._failures.get(task.plan.config.hash):
            # Its other models could not be judged either.
            emit(events.ModelFinished(task.model, str(Status.FAILED), failure.message))
            return TaskOutcome(failure, 0.0)
        return measure_task(task, crew, emit)

    def _take(self, task: ModelTask, outcome: TaskOutcome) -> None:
        config = task.plan.config
        experiment = self._experiments[config.hash]
        experiment.seconds += outcome.seconds
        if isinstance(outcome.result, Failure):
            if config.hash not in self._failures:
                self._fail(config, outcome.result, experiment.seconds)
            return
        experiment.outcomes[task.model] = outcome.result
        try:
            # A claim on what the probe does not measure is known with the first model, and not after the last.
            judged(config, task.plan.probe, [outcome.result.result])
        except ConfigError as error:
            if config.hash not in self._failures:
                self._fail(config, failure_of(config.name, error), experiment.seconds)
            return
        if len(experiment.outcomes) == len(config.models):
            self._conclude(experiment)

    def _conclude(self, experiment: _Experiment) -> None:
        config = experiment.plan.config
        ordered = [experiment.outcomes[model] for model in config.models]
        try:
            result = _conclude(experiment.plan, experiment.store, ordered)
            experiment.store.log("finished", seconds=round(experiment.seconds, 3))
        except Exception as error:
            self._fail(config, failure_of(config.name, error), experiment.seconds)
            return
        self._results[config.hash] = result
        self._emit(events.RunFinished(str(result.folder), experiment.seconds))
        self._emit(events.ExperimentFinished(config.name, self._finished(), self._count, experiment.seconds))
        if self._on_result is not None:
            self._on_result(result)

    def _fail(self, config: ExperimentConfig, failure: Failure, seconds: float = 0.0) -> None:
        self._failures[config.hash] = failure
        finished = self._finished()
        self._emit(events.ExperimentFinished(config.name, finished, self._count, seconds, failure.message))

    def _finished(self) -> int:
        return len(self._results) + len(self._failures)


def _begin(plan: Plan, results_dir: str | Path, emit: events.Listener) -> Store:
    """The experiment's place in the results, its resolved configuration written there."""
    config = plan.config
    store = Store(results_dir, config.name, config.hash)
    store.write_text(CONFIG, config.to_yaml())
    register(store, config.claims)
    store.log("started", profile=config.profile, source=config.source, machine=provenance.machine())
    models = len(config.models)
    emit(events.RunStarted(config.name, config.hash, str(store.folder), models, len(plan.pairs), plan.cells * models))
    return store


def _conclude(plan: Plan, store: Store, outcomes: Sequence[ModelOutcome]) -> RunResult:
    """Judge the claims and write rows and summary."""
    config = plan.config
    table = concatenated([outcome.rows for outcome in outcomes])
    if table.num_rows:
        table = table.add_column(0, "experiment", pa.array([config.hash] * table.num_rows))
    rows = parquet_bytes(table)
    store.write_bytes(ROWS, rows)
    models = [outcome.result for outcome in outcomes]
    result = RunResult(
        config=config,
        hash=config.hash,
        folder=store.folder,
        models={model.name: model for model in models},
        verdicts=judged(config, plan.probe, models, registration(store.folder)),
        provenance={
            "code": provenance.code_version(),
            "packages": provenance.package_versions(),
            "source": provenance.source_hash(),
            "threads": provenance.threads(),
        },
    )
    store.write_bytes(SUMMARY, json_bytes(signed(result.to_record(), rows)))
    return result
