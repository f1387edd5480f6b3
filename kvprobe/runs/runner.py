"""Runs an experiment: model by model and cell by cell, resumable at any point, to effects and verdicts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pyarrow as pa

from kvprobe.runs import events, provenance
from kvprobe.runs.claims import Verdict, adjust, judge, not_applicable
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.executors import Executor, InProcessExecutor
from kvprobe.runs.measuring import ModelOutcome, SubjectLoader, log_event, measure_model
from kvprobe.runs.preparation import Plan, check_model_names, make_plan
from kvprobe.runs.results import CONFIG, ROWS, SUMMARY, ModelResult, RunResult, Status
from kvprobe.runs.store import Store, concatenated


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
        load_subject = default_loader()
    plan = make_plan(config)
    store = begin(plan, results_dir, on_event)
    tracker = events.Tracker(len(config.models), on_event)
    executor = executor or InProcessExecutor()
    started = time.monotonic()
    try:
        outcomes = [
            measure_model(plan, name, store=store, executor=executor, load_subject=cache(load_subject), emit=tracker)
            for name in config.models
        ]
    except KeyboardInterrupt:
        log_event(store, "interrupted")
        on_event(events.RunInterrupted(tracker.finished, plan.cells * len(config.models)))
        raise
    return conclude(plan, store, outcomes, time.monotonic() - started, on_event)


def begin(plan: Plan, results_dir: str | Path, emit: events.Listener) -> Store:
    """The experiment's place in the results, its resolved configuration written there.

    Raises:
        StoreError: the results folder cannot be written.
    """
    config = plan.config
    store = Store(results_dir, config.name, config.hash)
    store.write_text(CONFIG, config.to_yaml())
    log_event(store, "started", profile=config.profile, source=config.source, machine=provenance.machine())
    models = len(config.models)
    emit(events.RunStarted(config.name, config.hash, str(store.folder), models, len(plan.pairs), plan.cells * models))
    return store


def conclude(
    plan: Plan, store: Store, outcomes: Sequence[ModelOutcome], seconds: float, emit: events.Listener
) -> RunResult:
    """Judge the claims and write rows and summary.

    Args:
        plan: the experiment.
        store: its place in the results.
        outcomes: of its models, in order.
        seconds: that measuring took, for the log.
        emit: told that the run is finished.

    Raises:
        ConfigError: a claim is about something that the probe does not measure.
        StoreError: the results folder cannot be written.
    """
    config = plan.config
    table = concatenated([outcome.rows for outcome in outcomes])
    if table.num_rows:
        table = table.add_column(0, "experiment", pa.array([config.hash] * table.num_rows))
    store.write_table(ROWS, table)
    models = [outcome.result for outcome in outcomes]
    result = RunResult(
        config=config,
        hash=config.hash,
        folder=store.folder,
        models={model.name: model for model in models},
        verdicts=tuple(_verdicts(plan, models)),
        provenance={
            "code": provenance.code_version(),
            "packages": provenance.package_versions(),
            "source": provenance.source_hash(),
            "threads": provenance.threads(),
        },
    )
    store.write_json(SUMMARY, result.to_record())
    log_event(store, "finished", seconds=round(seconds, 3))
    emit(events.RunFinished(str(store.folder), seconds))
    return result


def default_loader() -> SubjectLoader:
    """The loader of kvprobe itself, which takes seconds to import."""
    from kvprobe.models.loader import load_subject

    loader: SubjectLoader = load_subject
    return loader


def _verdicts(plan: Plan, models: Sequence[ModelResult]) -> list[Verdict]:
    verdicts, config = [], plan.config
    for claim in config.claims:
        for model in models:
            if claim.models and model.name not in claim.models:
                continue
            if model.status is Status.MEASURED:
                verdicts.append(judge(claim, model.name, model.effects, plan.probe.read_by().may_lack))
            else:
                verdicts.append(not_applicable(claim, model.name, model.reason))
    return adjust(verdicts, config.statistics.false_discovery_rate)
