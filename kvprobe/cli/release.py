"""`kvprobe release`: finished runs in the form in which they are published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvprobe.cli.app import app


@app.command(epilog="Example: kvprobe release results/released")
def release(results_dir: Annotated[Path, typer.Argument(help="Folder of results, or of one run.")]) -> None:
    """Make finished runs small enough to publish; `kvprobe report` draws what is left out."""
    from kvprobe.runs.release import release as released

    runs = released(results_dir)
    size = sum(file.stat().st_size for folder in runs for file in folder.glob("*") if file.is_file())
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    typer.echo(f"{count} in the light form: {size / 1e6:.1f} MB without cells.")
