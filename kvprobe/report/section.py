"""A section's report: what was found, its main figure, all verdicts, the other panels as a supplement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvprobe.figures.style import save_figure
from kvprobe.report.counts import fixed_before
from kvprobe.report.findings import findings_markdown
from kvprobe.report.section_figure import Page, pages_of
from kvprobe.report.section_tables import count_markdown, counts_markdown, verdict_markdown
from kvprobe.report.tables import markdown_table
from kvprobe.report.write import SUMMARY_FILE, write_report, write_text
from kvprobe.runs.explain import FIGURE_KEY, command_of
from kvprobe.runs.results import Failure, RunResult, failure_of
from kvprobe.runs.section import SectionResult
from kvprobe.runs.store import SHORT_HASH

_BEGIN, _END = "<!-- counts -->", "<!-- end of counts -->"


@dataclass(frozen=True)
class SectionReport:
    """The files of a section's report, and what of it could not be made."""

    figures: tuple[Path, ...]
    summary: Path
    failures: tuple[Failure, ...]


class Reports:
    """Writes the report of each run it is called with; one that cannot be drawn leaves one sentence."""

    def __init__(self) -> None:
        self.summaries: list[Path] = []
        self.failures: list[Failure] = []

    def __call__(self, result: RunResult) -> None:
        """Write the run's report beside its results."""
        try:
            self.summaries.append(write_report(result).summary)
        except Exception as error:
            self.failures.append(failure_of(result.config.name, error))


def write_section(section: SectionResult, folder: Path) -> SectionReport:
    """Write `section3.md` and the figures it shows, `.png` and `.svg`, into `folder`.

    The experiments' own reports are `Reports`' work. A panel that cannot be drawn leaves one sentence.

    Raises:
        StoreError: the folder cannot be written.
    """
    failures: list[Failure] = []
    pages = pages_of(section, failures)
    files = [file for page in pages for file in save_figure(page.figure, folder / page.name, _metadata(page))]
    for stale in set(folder.glob(f"{section.name}_supplement_*.*")) - set(files):
        stale.unlink()
    summary = write_text(folder / f"{section.name}.md", section_markdown(section, folder, pages))
    return SectionReport(tuple(files), summary, tuple(failures))


def write_counts(readme: Path, sections: Sequence[SectionResult]) -> bool:
    """Put the counts where a text has `<!-- counts -->` and `<!-- end of counts -->`; whether it has.

    Raises:
        StoreError: the file cannot be written.
    """
    before, found, rest = readme.read_text(encoding="utf-8").partition(_BEGIN) if readme.is_file() else ("", "", "")
    _, end, after = rest.partition(_END)
    if found and end:
        write_text(readme, f"{before}{_BEGIN}\n{counts_markdown(sections)}\n{_END}{after}")
    return bool(found and end)


def section_markdown(section: SectionResult, folder: Path, pages: Sequence[Page]) -> str:
    """What was found, the main figure with its caption, all verdicts, the other panels, and how to make it again."""
    rows = []
    for result in section.results:
        link = (result.folder / SUMMARY_FILE).relative_to(folder)
        rows.append((f"[{result.config.name}]({link})", result.config.question, f"`{command_of(result)}`"))
    rows += [(failure.experiment, f"failed: {failure.message}", "") for failure in section.failures]
    warnings = [f"**Warning: {result.config.name}: {result.altered}**" for result in section.results if result.altered]
    main, *others = [_page_markdown(page) for page in pages] or [""]
    parts = [
        f"# {section.name}",
        *warnings,
        findings_markdown(section.results),
        main,
        "## Verdicts",
        count_markdown(section),
        fixed_before(verdict for _, verdict in section.verdicts()),
        "The paper's values were measured on larger models of its own.",
        verdict_markdown(section),
        *(["## Supplement", *others] if others else []),
        "## Experiments",
        markdown_table(("experiment", "question", "command"), rows),
        "Runs: " + ", ".join(f"{result.config.name} {result.hash[:SHORT_HASH]}" for result in section.results) + ".",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _page_markdown(page: Page) -> str:
    caption = "\n".join(f"- {line}" for line in page.caption)
    return f"![{page.name}]({page.name}.png)\n\n{caption}"


def _metadata(page: Page) -> dict[str, str]:
    return {FIGURE_KEY: ", ".join(f"{result.config.name}/{result.hash}" for result in page.results)}
