"""The tables of a run: one set of rows, shown in the terminal and written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.contestants.base import REFERENCE
from benchmarks.results import Report, Spread, SweepLine
from kvprobe.cli.terminal import Terminal
from kvprobe.report.tables import markdown_table

_GOOD, _BAD = "green", "bold red"


@dataclass(frozen=True)
class Sheet:
    """A table: title, what it says, headings, rows, and the rows that stand out as bad."""

    title: str
    caption: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    bad: frozenset[int] = frozenset()


def sheets(report: Report) -> list[Sheet]:
    """All tables of a run that have rows."""
    made = [_aims(report), _sweeps(report), _moves(report), _first_tokens(report)]
    return [sheet for sheet in made if sheet.rows]


def terminal(report: Report) -> RenderableType:
    """The tables for a terminal."""
    return Group(Text(machine_line(report)), *(part for sheet in sheets(report) for part in _shown(sheet)))


def markdown(report: Report) -> str:
    """The same as a Markdown document."""
    parts = ["# Benchmarks", machine_line(report)]
    for sheet in sheets(report):
        parts += [
            f"## {sheet.title}",
            *([sheet.caption] if sheet.caption else []),
            markdown_table(sheet.headings, sheet.rows),
        ]
    if report.sweeps:
        parts.append("![How much longer others take than kvprobe](bench.png)")
    return "\n\n".join(parts) + "\n"


def machine_line(report: Report) -> str:
    """The machine, its rates and the versions in one paragraph."""
    machine, code = report.machine, report.machine["kvprobe"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commit = f"{(code['commit'] or 'no commit')[:12]}{' with changes' if code['dirty'] else ''}"
    rates = ""
    if report.gflops and report.memory_gb_per_s:
        rates = (
            f" float32 matrix product {_spread(report.gflops, 0)} GFLOP/s, memory "
            f"{_spread(report.memory_gb_per_s)} GB/s read and written."
        )
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {machine['memory_gb']} GB."
        f"{rates} {versions}; kvprobe {commit}. {report.seconds / 60:.1f} minutes"
        f"{'' if report.complete else ', not finished'}."
    )


def print_report(report: Report, console: Terminal) -> None:
    """Show all tables."""
    console.print(terminal(report))


def _shown(sheet: Sheet) -> list[RenderableType]:
    table = Table(title=sheet.title, title_justify="left", title_style="bold", header_style="bold", box=None)
    for place, heading in enumerate(sheet.headings):
        table.add_column(heading, justify="left" if place < 3 else "right", overflow="fold")
    for number, row in enumerate(sheet.rows):
        table.add_row(*row, style=_BAD if number in sheet.bad else None)
    return [Text(""), table, Text(sheet.caption, style="dim")]


def _aims(report: Report) -> Sheet:
    rows = [(aim.verdict, aim.text, aim.measured) for aim in report.aims]
    bad = frozenset(number for number, aim in enumerate(report.aims) if aim.verdict == "not met")
    return Sheet("Aims", "", ("verdict", "aim", "measured"), rows, bad)


def _sweeps(report: Report) -> Sheet:
    headings = (
        "model", "sweep", "contestant", "tokens", "rows run", "seconds", "kvprobe is faster by", "of the limit",
        "largest difference", "tolerated", "largest effect",
    )  # fmt: skip
    rows = [_sweep_row(line) for line in report.sweeps]
    bad = frozenset(number for number, line in enumerate(report.sweeps) if line in report.disagreeing)
    caption = (
        "Medians with quartiles over rounds in which all take turns. Where fewer rows were run than the sweep has, "
        "the seconds are extrapolated linearly. Of the limit: the shortest time this machine allows for the "
        "contestant's own way of doing it, over the time it took. Differences are of margins from kvprobe's, in logits."
    )
    return Sheet("Sweeps", caption, headings, rows, bad)


def _sweep_row(line: SweepLine) -> tuple[str, ...]:
    start = (line.model, line.sweep, line.label, str(line.tokens))
    if line.note or line.seconds is None or line.ratio is None:
        return (*start, line.note or "not measured", *[""] * 6)
    run = str(line.rows) if line.measured == line.rows else f"{line.measured} of {line.rows}"
    ours = line.contestant == REFERENCE
    numbers = (line.difference or 0.0, line.tolerance or 0.0, line.effect or 0.0)
    compared = ["", *(f"{number:.1e}" for number in numbers[1:])] if ours else [f"{number:.1e}" for number in numbers]
    return (
        *start,
        run,
        _seconds(line.seconds),
        "1" if ours else _spread(line.ratio, 1 if line.ratio.median >= 10 else 2),
        f"{_short(line.of_limit or 0.0)} {line.bound}",
        *compared,
    )


def _moves(report: Report) -> Sheet:
    rows = [
        (
            line.model,
            line.operation,
            str(line.tokens),
            f"{line.nbytes / 1e6:.1f}",
            f"{line.rate / 1e9:.2f}",
            f"{line.copy_rate / 1e9:.2f}",
            _spread(line.of_copy),
            f"{line.of_limit:.2f}",
        )
        for line in report.moves
    ]
    headings = ("model", "operation", "entries", "MB", "GB/s", "plain copy, GB/s", "of plain copy", "of the limit")
    caption = (
        "Bytes of keys for re-rotation, of keys and values for splice. The plain copy clones the same tensors. The "
        "limit reads and writes every byte once at the rate of a copy into memory that is there already."
    )
    return Sheet("Moving cached entries", caption, headings, rows)


def _first_tokens(report: Report) -> Sheet:
    rows = [
        (
            line.model,
            str(line.tokens),
            str(line.rounds),
            _seconds(line.splice_seconds),
            _seconds(line.prefill_seconds),
            _spread(line.ratio, 1),
            f"{line.splice_of_limit:.2f}",
            f"{line.prefill_of_limit:.2f}",
        )
        for line in report.first_tokens
    ]
    headings = (
        "model", "chunk tokens", "rounds", "spliced, s", "prefilled, s", "splice is faster by", "splice of its limit",
        "prefill of its limit",
    )  # fmt: skip
    caption = "From token ids to the logits of one position; 16 tokens stand before and 16 after a compiled chunk."
    return Sheet("Time to the first token", caption, headings, rows)


def _spread(spread: Spread, digits: int = 2) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def _seconds(spread: Spread) -> str:
    return f"{_short(spread.median)} ({_short(spread.low)} to {_short(spread.high)})"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.2g}" if number < 1 else f"{number:.3g}"
