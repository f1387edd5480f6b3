"""`kvprobe doctor`: what may go wrong on this machine, one line each with the mend."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvprobe.cli.app import FAILED, app
from kvprobe.cli.run import RESULTS, ResultsOption
from kvprobe.cli.terminal import Terminal, say

_STYLES = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "bold red")}


@app.command(epilog="Example: kvprobe doctor --json")
def doctor(
    results: ResultsOption = RESULTS,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON instead of lines.")] = False,
) -> None:
    """Check threads, dtypes, memory, GPU, versions and known traps; the exit code is 1 if something is broken."""
    findings = _told(results, as_json=as_json)
    if "problem" in findings:
        raise typer.Exit(FAILED)


def _told(results: Path, *, as_json: bool) -> list[str]:
    """Show all findings. Returns their marks."""
    from kvprobe.doctor import examine

    if as_json:
        found = [{"check": name, **asdict(finding)} for name, finding in examine(results)]
        say(json.dumps(found, indent=1, ensure_ascii=False))
        return [str(finding["mark"]) for finding in found]
    console, marks = Terminal(), []
    for name, finding in examine(results):
        sign, style = _STYLES[finding.mark]
        mend = f" → {finding.mend}" if finding.mend else ""
        line = Text.assemble((f"{sign} {finding.mark:<8}", style), f"{name}: {finding.text}", (mend, "bold"))
        console.print(line, soft_wrap=True)
        marks.append(str(finding.mark))
    return marks
