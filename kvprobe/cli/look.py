"""Commands that look at what there is: `list`, `show`, `explain`, `report`."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from kvprobe.cli.app import FAILED, app
from kvprobe.cli.run import RESULTS, ResultsOption, tell_failure
from kvprobe.cli.terminal import Terminal, say
from kvprobe.errors import ConfigError, StoreError
from kvprobe.registry import KINDS, describe

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from kvprobe.runs import ExperimentConfig, RunResult
    from kvprobe.runs.results import Failure

_ROW_COLUMNS = (
    "model",
    "pair_id",
    "skeleton",
    "wording",
    "intervention",
    "region",
    "layer",
    "margin",
    "m_base",
    "m_donor",
)


class Kind(StrEnum):
    """What `kvprobe list` lists."""

    PROBES = "probes"
    TASKS = "tasks"
    MODELS = "models"
    WORDINGS = "wordings"
    EDITS = "edits"
    SELECTIONS = "selections"
    WEIGHT_EDITS = "weight-edits"
    REUSE_SCHEMES = "reuse-schemes"
    AGENTS = "agents"
    EXPERIMENTS = "experiments"
    CLAIMS = "claims"


@app.command("list", epilog="Example: kvprobe list probes")
def list_names(kind: Annotated[Kind | None, typer.Argument(help="[default: all but claims]")] = None) -> None:
    """List what can be used by name, with one line on each."""
    from kvprobe.report.tables import plain_table

    console = Terminal()
    for each in [kind] if kind else [each for each in Kind if each is not Kind.CLAIMS]:
        described = _DESCRIBE[each]()
        console.print(plain_table(each, ("name", "what it is"), sorted(described.items())))


@app.command(epilog="Example: kvprobe show locality")
def show(
    target: Annotated[str, typer.Argument(help="A finished run (folder or name), or an experiment (file or name).")],
    results: ResultsOption = RESULTS,
    *,
    effects: Annotated[bool, typer.Option("--effects", help="Also show every effect, claimed or not.")] = False,
) -> None:
    """Show an experiment, or the verdicts of a finished run."""
    from kvprobe.runs import find_runs, load_config, load_result
    from kvprobe.runs.experiments import experiment_files
    from kvprobe.runs.results import SUMMARY

    path = Path(target)
    if (path / SUMMARY).is_file():
        _show_result(load_result(path), effects=effects)
    elif not path.exists() and (runs := find_runs(results, target)):
        _show_result(load_result(runs[-1]), effects=effects)
    else:
        for file in experiment_files([target]):
            _show_experiment(load_config(file), effects=effects)


@app.command("explain", epilog="Example: kvprobe explain locality/qwen3-note-taker/field_only.recovery")
def explain_command(
    target: Annotated[str, typer.Argument(help="A figure, a run, experiment/model/effect (or claim), a cell's key.")],
    results: ResultsOption = RESULTS,
    rows: Annotated[int, typer.Option(min=0, help="How many rows of measurements to show.")] = 5,
    csv: Annotated[Path | None, typer.Option(help="Write all rows behind it to this file.")] = None,
) -> None:
    """Trace a figure or a number to its rows, its configuration and its command."""
    from kvprobe.runs.explain import explain

    explanation = explain(target, results)
    console = Terminal()
    behind = explanation.rows
    for line in explanation.lines():
        console.print(line, soft_wrap=True)
    if rows and len(behind):
        title = f"The first {min(rows, len(behind))} of the {len(behind)} rows behind it"
        console.print(_rows_table(title, behind.head(rows)))
    if csv is not None:
        try:
            behind.to_csv(csv, index=False)
        except OSError as error:
            raise StoreError(f"The file {csv} cannot be written ({error.strerror}); choose another.") from error
        console.print(f"{len(behind)} rows written to {csv}.", soft_wrap=True)


@app.command(epilog="Example: kvprobe report runs")
def report(
    results_dir: Annotated[Path, typer.Argument(help="Folder of results, or of one run.")] = RESULTS,
    *,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Write the page alone, with the figures that are there.")
    ] = False,
) -> None:
    """Draw figures and write summaries of finished runs, the newest of each experiment, and one page of them all."""
    from kvprobe.html.page import load_newest, write_page
    from kvprobe.report.section import Reports
    from kvprobe.runs import load_result
    from kvprobe.runs.results import SUMMARY

    one = (results_dir / SUMMARY).is_file()
    found, failures = ([load_result(results_dir)], []) if one else load_newest(results_dir)
    if not found and not failures:
        raise StoreError(f"{results_dir} holds no finished run; run an experiment first, or give another folder.")
    reports = Reports()
    if not page_only:
        for result in found:
            reports(result)
        say("\n".join(map(str, reports.summaries)))
        if not one:
            reports.failures += _report_sections(found, results_dir)
    page = write_page(found, results_dir, failures)
    say(page.path)
    for failure in (*failures, *reports.failures, *page.failures):
        tell_failure(failure, named=True)
    if failures or reports.failures or page.failures:
        raise typer.Exit(FAILED)


def _report_sections(found: list[RunResult], folder: Path) -> list[Failure]:
    """Write the figure and the verdicts of each section, and an index of all runs; say where they are."""
    from kvprobe.report.section import write_section
    from kvprobe.report.write import write_index
    from kvprobe.runs.section import sections_of

    failures: list[Failure] = []
    for section in sections_of(found):
        written = write_section(section, folder)
        say("\n".join(map(str, (*written.figures, written.summary))))
        failures += written.failures
    say(write_index(found, folder))
    return failures


def _show_result(result: RunResult, *, effects: bool) -> None:
    from kvprobe.report.tables import effect_table, model_lines, verdict_tables

    console = Terminal()
    told = f" {result.hash[:12]}: {result.config.question}"
    console.print(Text.assemble((result.config.name, "bold"), told))
    console.print(verdict_tables(result, console.width))
    if effects:
        console.print(effect_table(result.effects))
    console.print(model_lines(result))
    console.print(f"\nFolder: {result.folder}", soft_wrap=True)


def _show_experiment(config: ExperimentConfig, *, effects: bool) -> None:
    from kvprobe.report.tables import number, plain_table
    from kvprobe.runs.preparation import make_probe

    console = Terminal()
    task = ", ".join(f"{key} {value}" for key, value in config.task.parameters.items())
    told = f" (section {config.section}): {config.question}"
    console.print(Text.assemble((config.name, "bold"), told))
    console.print(f"probe: {config.probe}\nmodels: {', '.join(config.models)}\ntask: {config.task.name}, {task}")
    rows = []
    for claim in config.claims:
        values = [claim.paper_value] if claim.paper_value is not None else list(claim.paper_values.values())
        paper = " to ".join(number(value) for value in sorted({min(values), max(values)})) if values else "–"
        rows.append((claim.id, claim.statement, paper, claim.source))
    console.print(plain_table("Claims", ("claim", "statement", "paper", "source"), rows))
    if effects:
        probe = make_probe(config)
        declared = probe.read_by().declared(probe) or ["The probe does not say what it measures before it has."]
        console.print("\n".join(declared), soft_wrap=True)


def _rows_table(title: str, rows: pd.DataFrame) -> Table:
    from kvprobe.report.tables import number, plain_table, short

    columns = [name for name in _ROW_COLUMNS if name in rows and rows[name].notna().any()]
    lines = [
        [number(value) if isinstance(value, float) else short(str(value)) for value in line]
        for line in rows[columns].itertuples(index=False)
    ]
    return plain_table(title, columns, lines)


def _models() -> dict[str, str]:
    from kvprobe.models.catalogue import model_config, model_names

    return {name: model_config(name).description for name in model_names()}


def _experiments() -> dict[str, str]:
    return {config.name: config.question for config in _configs()}


def _claims() -> dict[str, str]:
    return {
        f"{config.name}/{claim.id}": f"{claim.statement} ({claim.source or 'no source'})"
        for config in _configs()
        for claim in config.claims
    }


def _configs() -> list[ExperimentConfig]:
    from kvprobe.runs.config import load_config
    from kvprobe.runs.experiments import known_experiments

    configs = []
    for file in known_experiments().values():
        try:
            configs.append(load_config(file))
        except ConfigError as error:
            # One broken file must not hide all others.
            say(f"Warning: {error}", err=True)
    return configs


_DESCRIBE: dict[Kind, Callable[[], dict[str, str]]] = {
    Kind.PROBES: partial(describe, KINDS["PROBES"]),
    Kind.TASKS: partial(describe, KINDS["TASKS"]),
    Kind.MODELS: _models,
    Kind.WORDINGS: partial(describe, KINDS["WORDINGS"]),
    Kind.EDITS: partial(describe, KINDS["EDIT_METHODS"]),
    Kind.SELECTIONS: partial(describe, KINDS["SELECTIONS"]),
    Kind.WEIGHT_EDITS: partial(describe, KINDS["WEIGHT_EDITS"]),
    Kind.REUSE_SCHEMES: partial(describe, KINDS["REUSE_SCHEMES"]),
    Kind.AGENTS: partial(describe, KINDS["AGENTS"]),
    Kind.EXPERIMENTS: _experiments,
    Kind.CLAIMS: _claims,
}
