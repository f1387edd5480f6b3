"""All verdicts of a section in one table, for the terminal and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvprobe.report.counts import CHANGED, TITLES, by_kind, count_sentence, counted, counts_of, history
from kvprobe.report.tables import STATUS_STYLES, STYLES, VerdictLine, markdown_table, short
from kvprobe.runs.claims import ClaimKind, Outcome, Verdict
from kvprobe.runs.results import RunResult, Status
from kvprobe.runs.section import SectionResult

HEADLINE, LOST, ALIKE = "★", "†", "≈"
_COLUMNS = ("model", "paper", "ours", "p adj.", "verdict")
_WIDE = 100
"""From this many characters on there is room for the counts."""
_KEY = (
    f"{HEADLINE} headline claim. p adj.: two-sided p value of the claim's boundary, adjusted for multiple testing "
    "(Holm over the section's headline claims, Benjamini-Hochberg within an experiment for the others); – no test. "
    f"{LOST} the adjusted p value no longer supports the verdict. {ALIKE} the claim comes out alike on the models "
    f"set by hand, with notes and without. {CHANGED} the claim was made, changed or withdrawn after "
    "the first cell was measured."
)
_COUNTS = "n/cl/excl: included measurements / independent clusters / excluded by the gate."


def section_table(section: SectionResult, width: int = 80) -> Group:
    """All verdicts, claim by claim and model by model, and their counts, in at most `width` characters."""
    wide = width >= _WIDE
    names = [*_COLUMNS[:3], "n/cl/excl", *_COLUMNS[3:]] if wide else list(_COLUMNS)
    lines = section.verdicts()
    cells = [_cells(verdict, wide=wide) for _, verdict in lines]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    # What does not fit is taken from the intervals, then from the verdicts; both may go over two lines.
    left = width - 2 - sum(widths) - 2 * (len(widths) - 1)
    widths[2] = max(12, min(widths[2], widths[2] + left))
    widths[-1] = min(widths[-1], width - 2 - sum(widths[:-1]) - 2 * (len(widths) - 1))
    rows = [(result, verdict, row) for (result, verdict), row in zip(lines, cells, strict=True)]
    parts: list[RenderableType] = [_row(names, widths, "bold"), *_body(rows, widths)]
    for failure in section.failures:
        told = Text.assemble((failure.experiment, "bold underline"), (f"  failed: {failure.message}", "bold red"))
        parts += [Text(), told]
    key = Text(f"{_KEY} {_COUNTS if wide else ''}".strip(), "dim")
    return Group(*parts, Text(), _counts_table(section), key, Text(count_sentence(v for _, v in lines), "bold"))


def _body(rows: Sequence[tuple[RunResult, Verdict, Sequence[str]]], widths: Sequence[int]) -> Iterator[RenderableType]:
    """Kinds of claims apart; each experiment is told in full where it comes first."""
    told: set[str] = set()
    for kind in dict.fromkeys(kind for kind, _ in by_kind(verdict for _, verdict, _ in rows)):
        yield from (Text(), Text(TITLES[kind], "bold reverse"))
        shown: tuple[str, str] = "", ""
        for result, verdict, row in rows:
            if verdict.kind is not kind:
                continue
            if result.hash != shown[0]:
                yield from (Text(), *_heading(result, in_full=result.hash not in told))
                told.add(result.hash)
            if (result.hash, verdict.claim) != shown:
                yield Text.assemble((_claim(verdict), "bold"), (f"  {verdict.claim}", "dim"))
            yield _row(row, widths, "", STYLES[verdict.outcome][1] if verdict.survives else "yellow")
            shown = result.hash, verdict.claim


def verdict_markdown(section: SectionResult) -> str:
    """All verdicts in Markdown, a table for each kind of claims."""
    columns = ("experiment", "claim", *_COLUMNS[:3], "n/cl/excl", "p", *_COLUMNS[3:], "source")
    lines = section.verdicts()
    parts = []
    for kind, _ in by_kind(verdict for _, verdict in lines):
        rows = []
        for result, verdict in lines:
            if verdict.kind is kind:
                model, paper, ours, counts, adjusted, outcome = _cells(verdict, wide=True)
                claim = f"{marks(verdict)} `{verdict.statement}` {verdict.claim}{history(verdict)}".strip()
                p = p_text(verdict.p_value, verdict.p_reason)
                rows.append(
                    (result.config.name, claim, model, paper, ours, counts, p, adjusted, outcome, verdict.source)
                )
        parts.append(f"### {TITLES[kind]}\n\n{markdown_table(columns, rows)}")
    return "\n\n".join([*parts, f"{_KEY} {_COUNTS}"]) if parts else "No experiment makes claims."


def count_markdown(section: SectionResult) -> str:
    """How many verdicts of each outcome there are, kinds of claims apart, as a Markdown table below a sentence."""
    told = count_sentence(verdict for _, verdict in section.verdicts())
    columns = ("", *(f"{STYLES[outcome][0]} {outcome}" for outcome in Outcome), f"{LOST} after adjustment")
    return f"{told}\n\n{markdown_table(columns, _counted(section))}" if told else ""


def counts_markdown(sections: Sequence[SectionResult]) -> str:
    """A table of sections by kind."""
    by_section = {section.name: [verdict for _, verdict in section.verdicts()] for section in sections}
    kinds = [kind for kind, _ in by_kind(verdict for own in by_section.values() for verdict in own)]
    rows = []
    for name, verdicts in by_section.items():
        own = dict(by_kind(counted(verdicts)))
        told = [counts_of(kind, own[kind]) if kind in own else "–" for kind in kinds]
        rows.append((f"[{name}]({name}.md)", *told))
    return markdown_table(("", *(TITLES[kind] for kind in kinds)), rows)


def _counts_table(section: SectionResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("verdicts")
    for outcome in Outcome:
        table.add_column(str(outcome), style=STYLES[outcome][1], justify="right")
    table.add_column(LOST, style="yellow", justify="right")
    for row in _counted(section):
        table.add_row(*row)
    return table


def _counted(section: SectionResult) -> Iterator[list[str]]:
    for name, own in groups(verdict for _, verdict in section.verdicts()).items():
        yield [name, *_count(own)]


def groups(
    verdicts: Iterable[Verdict], sections: Mapping[str, Iterable[Verdict]] = MappingProxyType({})
) -> dict[str, list[Verdict]]:
    """Those that count of each kind; without checks the headlines, those of each section and of each model."""
    counting = counted(verdicts)
    results = without_checks(counting)
    return {
        **{TITLES[kind]: own for kind, own in by_kind(counting)},
        f"{HEADLINE} headlines": [verdict for verdict in results if verdict.headline],
        **{name: without_checks(counted(own)) for name, own in sections.items()},
        **{short(name): [v for v in results if v.model == name] for name in dict.fromkeys(v.model for v in results)},
    }


def without_checks(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those on claims that could come out otherwise."""
    return [verdict for verdict in verdicts if verdict.kind is not ClaimKind.IDENTITY]


def _count(verdicts: Sequence[Verdict]) -> list[str]:
    counts = Counter(verdict.outcome for verdict in verdicts)
    return [*(str(counts[outcome]) for outcome in Outcome), str(sum(not verdict.survives for verdict in verdicts))]


def _cells(verdict: Verdict, *, wide: bool) -> list[str]:
    line = VerdictLine.of(verdict)
    outcome = f"{STYLES[verdict.outcome][0]} {verdict.word}" + ("" if verdict.survives else f" {LOST}")
    outcome += f" (as in {verdict.shown_in})" if verdict.shown_in else ""
    counts = [line.counts] if wide else []
    return [line.model, line.paper, line.ours, *counts, p_text(verdict.p_adjusted), outcome]


def _heading(result: RunResult, *, in_full: bool) -> Iterator[Text]:
    """The experiment, and in full its pairs that count and why a model has none."""
    if not in_full:
        yield Text(result.config.name, "bold underline")
        return
    yield Text.assemble((result.config.name, "bold underline"), (f"  {result.config.question}", "dim"))
    if result.altered:
        yield Text(f"Warning: {result.altered}", "bold red")
    gates = [(short(model.name), model.gate) for model in result.models.values() if model.gate is not None]
    pairs = ", ".join(f"{name} {gate.included} of {gate.generated}" for name, gate in gates)
    yield Text(f"included pairs: {pairs or 'none'}", "dim")
    for model in result.models.values():
        if model.told != Status.MEASURED:
            yield Text(f"{short(model.name)}: {model.told}. {model.reason}", STATUS_STYLES[model.status])


def _row(cells: Sequence[str], widths: Sequence[int], style: str, last_style: str = "") -> Table:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=0)
    for width in widths:
        row.add_column(width=width, overflow="fold")
    *plain, last = cells
    row.add_row("", *(Text(cell, style) for cell in plain), Text(last, last_style or style))
    return row


def _claim(verdict: Verdict) -> str:
    return f"{marks(verdict)} {verdict.statement}".strip()


def marks(verdict: Verdict) -> str:
    """What stands before the claim: a headline, one that comes out alike without notes, one made later."""
    of_claim = (HEADLINE if verdict.headline else "") + ("" if verdict.tells_apart else ALIKE)
    return of_claim + (CHANGED if verdict.changed else "")


def p_text(value: float | None, why_none: str = "") -> str:
    """A p value with three decimals; where nothing was tested why, or `–`."""
    if value is None:
        return f"– ({why_none})" if why_none else "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"
