"""Tables of verdicts and effects, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvprobe.report.counts import TITLES, by_kind, count_sentence, history
from kvprobe.runs.claims import Outcome, Verdict

if TYPE_CHECKING:
    from kvprobe.runs.results import RunResult
    from kvprobe.stats import Effect

STYLES = {
    Outcome.HOLDS: ("✓", "green"),
    Outcome.FAILS: ("✗", "bold red"),
    Outcome.OPEN: ("?", "yellow"),
    Outcome.UNDERPOWERED: ("…", "yellow"),
    Outcome.NOT_APPLICABLE: ("–", "dim"),
}
STATUS_STYLES = {"measured": "green", "not applicable": "yellow", "failed": "bold red"}
_COLUMNS = ("model", "paper", "ours", "n/cl/excl", "verdict")
_KEY = "n/cl/excl: included measurements / independent clusters / pairs excluded by the gate"


@dataclass(frozen=True)
class VerdictLine:
    """One verdict as text."""

    claim: str
    statement: str
    source: str
    model: str
    paper: str
    ours: str
    counts: str
    outcome: Outcome
    word: str
    history: str

    @classmethod
    def of(cls, verdict: Verdict) -> VerdictLine:
        """A verdict as text."""
        effect, paper = verdict.effect, verdict.paper_value
        return cls(
            claim=verdict.claim,
            statement=verdict.statement,
            source=verdict.source,
            model=short(verdict.model),
            paper="–" if paper is None else number(paper),
            ours="–" if effect is None else interval(effect),
            counts="–" if effect is None else f"{effect.n}/{effect.clusters}/{effect.excluded}",
            outcome=verdict.outcome,
            word=verdict.word,
            history=history(verdict),
        )


def short(model: str) -> str:
    """A model's name without the folders or the owner that a path or a hub id begins with."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def number(value: float) -> str:
    """A number with three decimals, or in powers of ten where these would show nothing of it."""
    if value == 0 or 0.0005 <= abs(value) < 1e4:
        return f"{value:.3f}" if value % 1 else f"{value:.0f}"
    return f"{value:.1e}"


def interval(effect: Effect) -> str:
    """`0.034 [-0.012, 0.081]`; without an interval where the effect is no estimate, and marked where it is a range."""
    if effect.method == "exact":
        return f"{number(effect.estimate)} exactly"
    kind = "range " if effect.is_range else ""
    return f"{number(effect.estimate)} {kind}[{number(effect.low)}, {number(effect.high)}]"


def verdict_lines(result: RunResult) -> list[VerdictLine]:
    """All verdicts of a run, kinds apart, in the order of its claims."""
    return [VerdictLine.of(verdict) for _, verdicts in by_kind(result.verdicts) for verdict in verdicts]


def verdict_tables(result: RunResult, width: int = 80) -> Group:
    """A table for each claim, columns in line with each other as long as they fit into `width` characters."""
    lines = verdict_lines(result)
    widths: list[int | None] = [max(map(len, column)) for column in zip(_COLUMNS, *map(_cells, lines), strict=True)]
    # Three characters a column for padding and rules.
    if sum(filter(None, widths)) + 3 * len(widths) > width:
        widths = [None] * len(widths)
    tables: list[Table | Text] = []
    for claim in dict.fromkeys(line.claim for line in lines):
        of_claim = [line for line in lines if line.claim == claim]
        title = Text.assemble(
            (of_claim[0].statement, "bold"), f"   {claim}, {of_claim[0].source}".rstrip(", ") + of_claim[0].history
        )
        table = _table(title, zip(_COLUMNS, widths, strict=True))
        for line in of_claim:
            *plain, verdict = _cells(line)
            table.add_row(*plain, Text(verdict, STYLES[line.outcome][1]))
        tables.append(table)
    if result.altered:
        tables.insert(0, Text(f"Warning: {result.altered}", "bold red"))
    return Group(*tables, Text(count_sentence(result.verdicts)), Text(_KEY, "dim"))


def model_lines(result: RunResult) -> Group:
    """The status of each model, with its gate and attrition."""
    lines = []
    for model in result.models.values():
        status = model.told, STATUS_STYLES[model.status]
        lines.append(Text.assemble((f"{model.name}: ", "bold"), status, f". {model.reason}"))
    return Group(*lines)


def effect_table(effects: Mapping[str, Sequence[Effect]]) -> Table:
    """All effects of all models."""
    columns = ("effect", "model", "value", "unit", "n/cl", "method")
    table = _table(Text("Effects", "bold"), [(column, None) for column in columns])
    names = dict.fromkeys(effect.name for of_model in effects.values() for effect in of_model)
    for name in names:
        for model, of_model in effects.items():
            for effect in of_model:
                if effect.name == name:
                    counts = f"{effect.n}/{effect.clusters}"
                    table.add_row(name, short(model), interval(effect), effect.unit, counts, effect.method)
    return table


def plain_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of text in kvprobe's style."""
    table = _table(Text(title, "bold"), [(column, None) for column in columns])
    # What is named must stay in one piece, to be copied.
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def verdict_markdown(result: RunResult) -> str:
    """All verdicts as one Markdown table."""
    parts = []
    for kind, verdicts in by_kind(result.verdicts):
        lines = map(VerdictLine.of, verdicts)
        rows = [(f"`{line.statement}`{line.history}", *_cells(line), line.source) for line in lines]
        parts.append(f"{TITLES[kind]}:\n\n{markdown_table(('claim', *_COLUMNS, 'source'), rows)}")
    if result.altered:
        parts.insert(0, f"**Warning: {result.altered}**")
    return "\n\n".join([*parts, f"{count_sentence(result.verdicts)}\n\n{_KEY}."])


def _cells(line: VerdictLine) -> tuple[str, ...]:
    return line.model, line.paper, line.ours, line.counts, f"{STYLES[line.outcome][0]} {line.word}"


def _table(title: Text, columns: Iterable[tuple[str, int | None]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    for name, width in columns:
        table.add_column(name, min_width=width, overflow="fold")
    return table
