"""`kvprobe run`: experiments from YAML to verdicts and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvprobe.cli.app import FAILED, INTERRUPTED, app
from kvprobe.cli.experiments import experiment_files

if TYPE_CHECKING:
    from kvprobe.runs import ExperimentConfig, RunResult

RESULTS = Path("runs")
ResultsOption = Annotated[Path, typer.Option("--results", help="Folder of all results.")]


@app.command(epilog="Example: kvprobe run experiments/section3/locality.yaml --models qwen3-note-taker --profile quick")
def run(
    experiments: Annotated[list[str], typer.Argument(help="YAML files, folders of them, sections (3) or names.")],
    models: Annotated[
        str | None, typer.Option(help="Models instead of the file's: names with commas, or one of its groups (paper).")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Size: full, or a profile of the file (quick).")] = None,
    results: ResultsOption = RESULTS,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells of work and measure nothing.")] = False,
) -> None:
    """Run experiments, or what is left of them, and judge their claims."""
    from kvprobe.models.catalogue import model_config
    from kvprobe.runs import load_config

    configs = [load_config(file, profile=profile, models=models) for file in experiment_files(experiments)]
    for name in (name for config in configs for name in config.models):
        # A misspelt name is better known now than after the models before it.
        model_config(name)
    if dry_run:
        for config in configs:
            _show_cells(config)
        return
    failed = [_run_one(config, results).failed for config in configs]
    if any(failed):
        typer.echo("Error: some of the work failed, as told above; what was measured is kept.", err=True)
        raise typer.Exit(FAILED)


def _run_one(config: ExperimentConfig, results: Path) -> RunResult:
    from kvprobe.cli.live import LiveRun
    from kvprobe.report.tables import model_lines, verdict_tables
    from kvprobe.report.write import write_report
    from kvprobe.runs import run_experiment

    console = Console(highlight=False)
    with LiveRun(Console(stderr=True)) as live:
        try:
            result = run_experiment(config, results_dir=results, on_event=live)
        except KeyboardInterrupt:
            kept = f"what is finished is kept in {live.folder or results}, and the same command goes on from there"
            typer.echo(f"Interrupted; {kept}.", err=True)
            raise typer.Exit(INTERRUPTED) from None
    console.print(verdict_tables(result, console.width))
    console.print(model_lines(result))
    report = write_report(result)
    console.print(f"\nFigure: {report.figures[0]}\nReport: {report.summary}", soft_wrap=True)
    return result


def _show_cells(config: ExperimentConfig) -> None:
    from kvprobe.report.tables import plain_table, short
    from kvprobe.runs.preparation import make_probe, make_task, prompt_pairs

    make_probe(config)
    pairs = len(prompt_pairs(make_task(config), config))
    cells = -(-pairs // config.block_size)
    rows = [(short(name), str(pairs), str(config.block_size), str(cells)) for name in config.models]
    title = f"{config.name} ({config.hash[:12]}): {cells * len(rows)} cells"
    Console(highlight=False).print(plain_table(title, ("model", "pairs", "pairs a cell", "cells"), rows))
