"""One experiment in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvprobe.errors import ConfigError
from kvprobe.runs import events
from kvprobe.runs.config import ExperimentConfig, load_config
from kvprobe.runs.results import RunResult
from kvprobe.runs.runner import run_experiment


def run(
    experiment: str | Path | ExperimentConfig,
    *,
    models: str | Sequence[str] | None = None,
    profile: str | None = None,
    results_dir: str | Path = "runs",
    on_event: events.Listener = events.ignore,
) -> RunResult:
    """Run an experiment in this process, or what is left of it, and judge its claims.

    Args:
        experiment: a name of `kvprobe list experiments`, a YAML file, or a configuration.
        models: in place of the file's models: one of its groups, names with commas, or a list.
        profile: of the file, such as `quick`; by default the file as it is.
        results_dir: root of all results, as for `kvprobe run`.
        on_event: called with every `kvprobe.runs.events.Event`.

    Raises:
        ConfigError: the file is wrong, or a configuration is given together with a profile or models.
        UnknownNameError: there is no such experiment, probe, task or model; with the nearest names.
        StoreError: the results folder cannot be written.
    """
    if not isinstance(experiment, ExperimentConfig):
        experiment = load_config(experiment, profile=profile, models=models)
    elif profile is not None or models is not None:
        raise ConfigError("A configuration has its profile and models already; give them to load_config.")
    return run_experiment(experiment, results_dir=results_dir, on_event=on_event)
