"""`python -m benchmarks`: measure, show the tables, write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvprobe.cli.app import FAILED, INTERRUPTED, quieten
from kvprobe.cli.terminal import Terminal, say
from kvprobe.errors import ConfigError, KvprobeError

MODEL_VARIABLE = "KVPROBE_BENCH_MODEL"
app = typer.Typer(pretty_exceptions_show_locals=False)


@app.command(epilog="Example: python -m benchmarks --only position,head --models smollm2-135m --tokens 512")
def bench(
    only: Annotated[
        str | None, typer.Option(help="Parts with commas: position, head, layer, suffix, move, first_token.")
    ] = None,
    models: Annotated[str | None, typer.Option(help="Models with commas: names or folders.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Prompt lengths of the sweeps, with commas.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. [default: as torch chooses]")] = None,
    results: Annotated[Path, typer.Option(help="Folder of bench.json, bench.md and the figure.")] = Path(
        __file__
    ).parent
    / "results",
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A first look in under two minutes.")] = False,
) -> None:
    """Measure kvprobe beside other ways of doing the same, and beside the limit of this machine.

    A folder with a larger model can be added in the environment variable KVPROBE_BENCH_MODEL.
    """
    quieten()
    try:
        failed = _bench(only, models, tokens, threads, results, quick=quick)
    except KvprobeError as error:
        say(f"Error: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say(f"Interrupted; what was measured is in {results / 'bench.json'}.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if failed:
        raise typer.Exit(FAILED)


def _bench(
    only: str | None, models: str | None, tokens: str | None, threads: int | None, results: Path, *, quick: bool
) -> bool:
    """Run, show and write. Returns whether a contestant disagreed or failed."""
    import torch

    from benchmarks.bench import run_benchmarks
    from benchmarks.settings import PARTS, QUICK, Settings
    from benchmarks.tables import print_report

    settings = QUICK if quick else Settings()
    changes: dict[str, object] = {}
    if only is not None:
        changes["parts"] = _known(only.split(","), PARTS)
    if tokens is not None:
        changes["tokens"] = _lengths(tokens)
    chosen = tuple(models.split(",")) if models else settings.models
    further = os.environ.get(MODEL_VARIABLE)
    changes["models"] = (*chosen, further) if further else chosen
    if threads is not None:
        torch.set_num_threads(threads)
    console = Terminal(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("starting", total=1.0)
        report = run_benchmarks(
            settings.model_copy(update=changes),
            results,
            lambda what, share: progress.update(task, description=what, completed=share),
        )
    print_report(report, Terminal())
    say(f"Written: {results / 'bench.json'}, {results / 'bench.md'}")
    for line in report.disagreeing:
        what = line.note or f"differs by {line.difference:.1e} logits, more than {line.tolerance:.1e}"
        say(f"Error: {line.label}, {line.sweep} sweep, {line.tokens} tokens, {line.model}: {what}", err=True)
    return bool(report.disagreeing)


def _known(names: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ConfigError(f"There is no part {name!r} of the benchmarks; known: {', '.join(known)}.")
    return tuple(names)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--tokens {text!r} is no list of whole numbers, such as 128,512.") from None
    if min(lengths) < 16:
        raise ConfigError(f"--tokens {min(lengths)} is too short for the sweeps; give 16 or more.")
    return lengths


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
