"""All verdicts of a section in one table, for the terminal and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvprobe.report.tables import STATUS_STYLES, STYLES, VerdictLine, markdown_table, short
from kvprobe.runs.claims import Outcome, Verdict
from kvprobe.runs.results import RunResult, Status
from kvprobe.runs.section import SectionResult

HEADLINE, LOST = "★", "†"
_COLUMNS = ("model", "paper", "ours", "p adj.", "verdict")
_WIDE = 100
"""From this many characters on there is room for the counts."""
_KEY = (
    f"{HEADLINE} headline claim. p adj.: two-sided p value of the claim's boundary, adjusted for multiple testing "
    "(Holm over the section's headline claims, Benjamini-Hochberg within an experiment for the others); – no test. "
    f"{LOST} the adjusted p value no longer supports the verdict."
)
_COUNTS = "n/cl/excl: included measurements / independent clusters / excluded by the gate."


def section_table(section: SectionResult, width: int = 80) -> Group:
    """All verdicts, claim by claim and model by model, and their counts, in at most `width` characters."""
    wide = width >= _WIDE
    names = [*_COLUMNS[:3], "n/cl/excl", *_COLUMNS[3:]] if wide else list(_COLUMNS)
    lines = section.verdicts()
    cells = [_cells(verdict, wide=wide) for _, verdict in lines]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    # What does not fit is taken from the intervals, which may go over two lines.
    widths[2] = max(12, min(widths[2], width - 2 - sum(widths) + widths[2] - 2 * (len(widths) - 1)))
    parts: list[RenderableType] = [_row(names, widths, "bold")]
    shown: tuple[str, str] = "", ""
    for (result, verdict), row in zip(lines, cells, strict=True):
        if result.hash != shown[0]:
            parts += [Text(), *_heading(result)]
        if (result.hash, verdict.claim) != shown:
            parts.append(Text.assemble((_claim(verdict), "bold"), (f"  {verdict.claim}", "dim")))
        style = STYLES[verdict.outcome][1]
        parts.append(_row(row, widths, "", style if verdict.survives else "yellow"))
        shown = result.hash, verdict.claim
    for failure in section.failures:
        told = Text.assemble((failure.experiment, "bold underline"), (f"  failed: {failure.message}", "bold red"))
        parts += [Text(), told]
    return Group(*parts, Text(), _counts_table(section), Text(f"{_KEY} {_COUNTS if wide else ''}".strip(), "dim"))


def verdict_markdown(section: SectionResult) -> str:
    """All verdicts as one Markdown table."""
    columns = ("experiment", "claim", *_COLUMNS[:3], "n/cl/excl", "p", *_COLUMNS[3:], "source")
    rows = []
    for result, verdict in section.verdicts():
        model, paper, ours, counts, adjusted, outcome = _cells(verdict, wide=True)
        p = p_text(verdict.p_value)
        claim = f"{HEADLINE if verdict.headline else ''} `{verdict.statement}` {verdict.claim}".strip()
        row = (result.config.name, claim, model, paper, ours, counts, p, adjusted, outcome, verdict.source)
        rows.append(row)
    return f"{markdown_table(columns, rows)}\n\n{_KEY} {_COUNTS}" if rows else "No experiment makes claims."


def count_markdown(section: SectionResult) -> str:
    """How many verdicts of each kind there are, as a Markdown table."""
    return markdown_table(("", *map(_outcome, Outcome), f"{LOST} after adjustment"), _counted(section))


def _counts_table(section: SectionResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("verdicts", no_wrap=True)
    for outcome in Outcome:
        table.add_column(str(outcome), style=STYLES[outcome][1], justify="right")
    table.add_column(LOST, style="yellow", justify="right")
    for row in _counted(section):
        table.add_row(*row)
    return table


def _counted(section: SectionResult) -> Iterator[list[str]]:
    verdicts = [verdict for _, verdict in section.verdicts()]
    for model in dict.fromkeys(verdict.model for verdict in verdicts):
        yield [short(model), *_count([verdict for verdict in verdicts if verdict.model == model])]
    yield [f"{HEADLINE} headlines", *_count([verdict for verdict in verdicts if verdict.headline])]
    yield ["all", *_count(verdicts)]


def _count(verdicts: Sequence[Verdict]) -> list[str]:
    counts = Counter(verdict.outcome for verdict in verdicts)
    return [*(str(counts[outcome]) for outcome in Outcome), str(sum(not verdict.survives for verdict in verdicts))]


def _cells(verdict: Verdict, *, wide: bool) -> list[str]:
    line = VerdictLine.of(verdict)
    outcome = _outcome(verdict.outcome) + ("" if verdict.survives else f" {LOST}")
    counts = [line.counts] if wide else []
    return [line.model, line.paper, line.ours, *counts, p_text(verdict.p_adjusted), outcome]


def _heading(result: RunResult) -> Iterator[Text]:
    """The experiment, its pairs that count, and why a model has none."""
    yield Text.assemble((result.config.name, "bold underline"), (f"  {result.config.question}", "dim"))
    gates = [(short(model.name), model.gate) for model in result.models.values() if model.gate is not None]
    counted = ", ".join(f"{name} {gate.included} of {gate.generated}" for name, gate in gates)
    yield Text(f"included pairs: {counted or 'none'}", "dim")
    for model in result.models.values():
        if model.status is not Status.MEASURED:
            yield Text(f"{short(model.name)}: {model.status}. {model.reason}", STATUS_STYLES[model.status])


def _row(cells: Sequence[str], widths: Sequence[int], style: str, last_style: str = "") -> Table:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=0)
    for width in widths:
        row.add_column(width=width, overflow="fold")
    *plain, last = cells
    row.add_row("", *(Text(cell, style) for cell in plain), Text(last, last_style or style))
    return row


def _claim(verdict: Verdict) -> str:
    return f"{HEADLINE} {verdict.statement}" if verdict.headline else verdict.statement


def _outcome(outcome: Outcome) -> str:
    return f"{STYLES[outcome][0]} {outcome}"


def p_text(value: float | None) -> str:
    """A p value with three decimals; `–` where nothing was tested."""
    if value is None:
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"
