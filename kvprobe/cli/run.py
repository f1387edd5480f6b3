"""`kvprobe run`: experiments from YAML to verdicts and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from kvprobe.cli.app import FAILED, INTERRUPTED, app, quieten
from kvprobe.cli.terminal import Terminal, say
from kvprobe.errors import ConfigError

if TYPE_CHECKING:
    from kvprobe.runs import ExperimentConfig, SectionResult
    from kvprobe.runs.results import Failure

RESULTS = Path("runs")
ExecutorName = Literal["processes", "ray"]
_SOME_FAILED = "Error: some of the work failed, as told above; what was measured is kept."
ResultsOption = Annotated[Path, typer.Option("--results", help="Folder of all results.")]


@app.command("run", epilog="Example: kvprobe run locality --models qwen3-note-taker --profile quick")
def run_command(
    experiments: Annotated[
        list[str], typer.Argument(help="Names of `kvprobe list experiments`, sections (3), YAML files or folders.")
    ],
    models: Annotated[
        str | None, typer.Option(help="Models instead of the file's: names with commas, or one of its groups (paper).")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Size: full, or a profile of the file (quick).")] = None,
    results: ResultsOption = RESULTS,
    *,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Models measured at the same time. [default: as many as cores and memory allow]"),
    ] = None,
    executor: Annotated[
        ExecutorName, typer.Option(help="Where models are measured: processes of this machine, or a Ray cluster.")
    ] = "processes",
    ray_address: Annotated[
        str | None,
        typer.Option(help="The cluster: auto or ray://HOST:10001. [default: the one Ray finds, else one here]"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the cells of work, and with --rehearse what they need; write nothing."),
    ] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="In a dry run, measure a few pairs of each model to foresee the rest.")
    ] = False,
    plugin: Annotated[
        list[Path] | None, typer.Option(help="A Python file that registers a probe, task or the like; repeatable.")
    ] = None,
) -> None:
    """Run experiments, or what is left of them, and judge their claims; of several, all together."""
    from kvprobe.models.catalogue import model_config
    from kvprobe.registry import use_plugin
    from kvprobe.runs import load_config
    from kvprobe.runs.experiments import experiment_files

    for file in plugin or ():
        use_plugin(file)
    _check_place(jobs, executor, ray_address)
    configs = [load_config(file, profile=profile, models=models) for file in experiment_files(experiments)]
    for name in (name for config in configs for name in config.models):
        # A misspelt name is better known now than after the models before it.
        model_config(name)
    if dry_run:
        _show_plan(configs, rehearse=rehearse)
        return
    place = {"jobs": jobs, "executor": executor, "ray_address": ray_address}
    if (_run_one if len(configs) == 1 else _run_several)(configs, results, place):
        raise typer.Exit(FAILED)


def _check_place(jobs: int | None, executor: str, ray_address: str | None) -> None:
    if executor == "ray" and jobs is not None:
        raise ConfigError("--jobs counts processes of this machine; Ray places workers itself, so leave it out.")
    if executor != "ray" and ray_address is not None:
        raise ConfigError("--ray-address needs --executor ray; add it, or leave the address out.")


def _run_one(configs: list[ExperimentConfig], results: Path, place: dict[str, Any]) -> bool:
    """Run an experiment, show its verdicts and write its report. Returns whether something failed."""
    from kvprobe.report.findings import findings_text
    from kvprobe.report.tables import model_lines, verdict_tables
    from kvprobe.report.write import write_report

    section = _run(configs, results, place)
    for failure in section.failures:
        tell_failure(failure)
    console = Terminal()
    for result in section.results:
        console.print(verdict_tables(result, console.width))
        console.print(model_lines(result))
        console.print(findings_text([result]))
        report = write_report(result)
        console.print(f"\nFigure: {report.figures[0]}\nReport: {report.summary}", soft_wrap=True)
        if result.failed:
            say(_SOME_FAILED, err=True)
    return _calibration_fails(section) or section.failed


def _run_several(configs: list[ExperimentConfig], results: Path, place: dict[str, Any]) -> bool:
    """Run experiments, show all verdicts in one table and draw one figure. Returns whether something failed."""
    from kvprobe.html.page import load_newest, write_page
    from kvprobe.report.findings import findings_text
    from kvprobe.report.section import Reports, write_section
    from kvprobe.report.section_tables import section_table

    reports = Reports()
    section = _run(configs, results, place, on_result=reports)
    console = Terminal()
    console.print(section_table(section, console.width))
    console.print(findings_text(section.results))
    written = write_section(section, results)
    figures = "".join(f"\nFigure: {file}" for file in written.figures[:1])
    console.print(f"{figures}\nReport: {written.summary}", soft_wrap=True)
    found, unread = load_newest(results)
    told = {failure.experiment: failure for failure in (*unread, *section.failures)}
    console.print(f"Page: {write_page(found, results, tuple(told.values())).path}", soft_wrap=True)
    failures = (*section.failures, *reports.failures, *written.failures)
    for failure in failures:
        tell_failure(failure, named=True)
    if failures or section.failed:
        say(_SOME_FAILED, err=True)
    return _calibration_fails(section) or bool(failures) or section.failed


def _calibration_fails(section: SectionResult) -> bool:
    """Say where a model set by hand gives another outcome than a claim declares. Returns whether one does."""
    from kvprobe.runs.calibration import calibration_faults

    faults = calibration_faults(section.results)
    for fault in faults:
        say(f"Calibration: {fault}", err=True)
    if faults:
        say(f"Error: {len(faults)} outcomes on models set by hand are not those that claims declare.", err=True)
    return bool(faults)


def _run(configs: list[ExperimentConfig], results: Path, place: dict[str, Any], **listeners: Any) -> SectionResult:
    from kvprobe.cli.live import LiveRun
    from kvprobe.runs import run_section

    with LiveRun(Terminal(stderr=True)) as live:
        try:
            return run_section(configs, results_dir=results, on_event=live, start_worker=quieten, **place, **listeners)
        except KeyboardInterrupt:
            kept = f"what is finished is kept in {live.folder or results}, and the same command goes on from there"
            say(f"Interrupted; {kept}.", err=True)
            raise typer.Exit(INTERRUPTED) from None


def tell_failure(failure: Failure, *, named: bool = False) -> None:
    """Say on stderr why an experiment failed, with the traceback of a bug."""
    if failure.details:
        say(failure.details, err=True)
    name = f"{failure.experiment}: " if named else ""
    say(f"Error: {name}{failure.message}", err=True)


def _show_plan(configs: list[ExperimentConfig], *, rehearse: bool) -> None:
    """The cells of work of each experiment and, from a rehearsal, the memory and time that they need."""
    from kvprobe.cli.live import time_taken
    from kvprobe.report.tables import plain_table, short
    from kvprobe.runs.preparation import make_plan
    from kvprobe.runs.rehearsal import Forecast, forecast
    from kvprobe.runs.runner import default_loader
    from kvprobe.runs.subjects import SubjectCache

    console, subjects, total = Terminal(), SubjectCache(default_loader()), 0.0
    for config in configs:
        plan, rows, reasons = make_plan(config), [], []
        for name in config.models:
            seen = Forecast(name, len(plan.pairs), None, None, 0)
            if rehearse:
                with console.status(Text(f"rehearsing {config.name} on {name}")):
                    seen = forecast(plan, name, subjects)
            memory = "" if seen.peak_bytes is None else f"{seen.peak_bytes / 1e9:.2f} GB"
            seconds = "" if seen.seconds is None else time_taken(seen.seconds)
            rows.append((short(name), str(seen.pairs), str(plan.cells), memory, seconds))
            reasons += [f"{short(name)}: {seen.reason}"] if seen.reason else []
            total += seen.seconds or 0.0
        title = f"{config.name} ({config.hash[:12]}): {plan.cells * len(rows)} cells"
        console.print(plain_table(title, ("model", "pairs", "cells", "peak memory", "about"), rows))
        for reason in reasons:
            console.print(reason, soft_wrap=True)
    if rehearse and len(configs) > 1:
        console.print(f"All together about {time_taken(total)} of one process, beside loading and reports.")
