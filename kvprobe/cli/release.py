"""`kvprobe release`: finished runs in the form in which they are published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvprobe.cli.app import app
from kvprobe.cli.terminal import say


@app.command(epilog="Example: kvprobe release results/released")
def release(results_dir: Annotated[Path, typer.Argument(help="Folder of results, or of one run.")]) -> None:
    """Judge finished runs by today's claims and make them small enough to publish; `kvprobe report` draws the rest.

    Nothing is measured again. Sections' figures and tables are written anew. A README.md in the
    folder gets the counts of verdicts where it marks their place.
    """
    from kvprobe.report.counts import count_sentence
    from kvprobe.report.section import write_counts, write_section
    from kvprobe.runs.release import lighten_figures
    from kvprobe.runs.release import release as released
    from kvprobe.runs.results import SUMMARY
    from kvprobe.runs.section import sections_of

    one = (results_dir / SUMMARY).is_file()
    runs = released(results_dir)
    size = sum(file.stat().st_size for run in runs for file in run.folder.glob("*") if file.is_file())
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    say(f"{count} in the light form: {size / 1e6:.1f} MB without cells.")
    if one:
        return
    sections = sections_of([*{run.config.name: run for run in runs}.values()])
    for section in sections:
        for failure in write_section(section, results_dir).failures:
            say(f"{failure.experiment}: {failure.message}", err=True)
        say(f"{section.name}: {count_sentence(verdict for _, verdict in section.verdicts())}")
    lighten_figures(results_dir)
    write_counts(results_dir / "README.md", sections)
