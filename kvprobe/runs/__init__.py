"""Experiments: their configuration, their cells and how these are run, stored and judged."""

from kvprobe.runs.claims import Claim, Outcome, Verdict
from kvprobe.runs.config import ExperimentConfig, load_config
from kvprobe.runs.executors import Executor, InProcessExecutor
from kvprobe.runs.preparation import Cell
from kvprobe.runs.results import ModelResult, RunResult, Status, find_runs, load_result
from kvprobe.runs.runner import run_experiment, run_section
from kvprobe.runs.section import SectionResult

__all__ = [
    "Cell",
    "Claim",
    "Executor",
    "ExperimentConfig",
    "InProcessExecutor",
    "ModelResult",
    "Outcome",
    "RunResult",
    "SectionResult",
    "Status",
    "Verdict",
    "find_runs",
    "load_config",
    "load_result",
    "run_experiment",
    "run_section",
]
