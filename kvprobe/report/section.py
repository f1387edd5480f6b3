"""A section's report: one figure of all its probes, one table of all its verdicts."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.figures.by_model import color_of
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS, save_figure, styled
from kvprobe.report.counts import fixed_before
from kvprobe.report.findings import findings_markdown
from kvprobe.report.section_tables import count_markdown, counts_markdown, verdict_markdown
from kvprobe.report.tables import markdown_table, short
from kvprobe.report.write import SUMMARY_FILE, panels, write_report, write_text
from kvprobe.runs.explain import FIGURE_KEY, command_of
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.results import Failure, RunResult, failure_of
from kvprobe.runs.section import SectionResult
from kvprobe.runs.store import SHORT_HASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL = (3.6, 2.75)
"""Width and height of one axes with its labels, in inches."""
_BEGIN, _END = "<!-- counts -->", "<!-- end of counts -->"
_PAGE = 0.8
"""Width over height that the figure comes near to, as a page has it."""
_TITLE, _TITLE_FITS = 10, 36
"""Size of a title, and how many characters of it fit above one axes; longer ones are set smaller."""
_KEY_MARK, _KEY_LETTER = 0.65, 0.09
"""Width in the key of a mark with the gaps around it, and of a letter, in inches."""
_SIZES = {
    "font.size": 10,
    "axes.titlesize": _TITLE,
    "axes.labelsize": 10,
    "xtick.labelsize": 8.5,
    "legend.fontsize": 11,
}


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
    """Write `section3.png`, `.svg` and `.md` into `folder`; the experiments' own reports are `Reports`' work.

    An experiment whose panel cannot be drawn leaves one sentence and an empty panel.

    Raises:
        StoreError: the folder cannot be written.
    """
    failures: list[Failure] = []
    figure, caption = draw_section(section, failures)
    hashes = {FIGURE_KEY: ", ".join(f"{result.config.name}/{result.hash}" for result in section.results)}
    files = save_figure(figure, folder / section.name, hashes) if figure is not None else []
    summary = write_text(folder / f"{section.name}.md", section_markdown(section, folder, caption))
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


def draw_section(section: SectionResult, failures: list[Failure]) -> tuple[Figure | None, list[str]]:
    """One axes with a letter for each experiment whose probe has a main plot, and the caption, a line for each.

    Args:
        section: the finished experiments.
        failures: a plot that cannot be drawn is added to them.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [result for result in section.results if make_probe(result.config).read_by().has_main]
    if not shown:
        return None, []
    columns = math.ceil(math.sqrt(_PAGE * len(shown) * _PANEL[1] / _PANEL[0]))
    rows = -(-len(shown) // columns)
    models = list(dict.fromkeys(model for result in shown for model in result.models))
    caption = []
    with styled(), rc_context(_SIZES):
        figure = Figure(figsize=(columns * _PANEL[0], rows * _PANEL[1] + 0.7), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for result, letter, axes in zip(shown, letters(), grid, strict=False):
            try:
                _draw(axes, result, models)
            except Exception as error:
                failures.append(failure_of(result.config.name, error))
                axes.clear()
            _name(axes, letter, result)
            caption.append(f"**{letter}**, {result.config.name}: {result.config.question} {sample_of(result)}")
        for axes in grid:
            axes.set_axis_off()
        _add_key(figure, [short(model) for model in models])
    return figure, caption


def letters() -> Iterator[str]:
    """A to Z, then AA, AB and so on."""
    yield from string.ascii_uppercase
    for first in string.ascii_uppercase:
        yield from (first + second for second in string.ascii_uppercase)


def sample_of(result: RunResult) -> str:
    """How many pairs and skeletons count for each model, and what the intervals are, in one sentence."""
    counts = []
    for model in result.models.values():
        if model.gate is None or not model.effects:
            counts.append(f"{short(model.name)} {model.status}")
            continue
        count = max(effect.clusters for effect in model.effects)
        if model.gate.oracle_accuracy is not None:
            # Effects over other units than pairs, such as single tokens, count clusters of their own.
            count = min(count, model.gate.oracle_accuracy.clusters)
        clusters = f"{count} {result.config.statistics.cluster}s"
        counts.append(f"{short(model.name)} {model.gate.included} of {model.gate.generated} pairs, {clusters}")
    used = {verdict.effect.method for verdict in result.verdicts if verdict.effect}
    kinds = ", ".join(sorted(used - {"exact"})) or "none"
    return f"n: {'; '.join(counts)}. Intervals: {result.config.statistics.confidence:.0%}, {kinds}."


def section_markdown(section: SectionResult, folder: Path, caption: Sequence[str]) -> str:
    """The section's figure with its caption, all verdicts, and how to make it again."""
    rows = []
    for result in section.results:
        link = (result.folder / SUMMARY_FILE).relative_to(folder)
        rows.append((f"[{result.config.name}]({link})", result.config.question, f"`{command_of(result)}`"))
    rows += [(failure.experiment, f"failed: {failure.message}", "") for failure in section.failures]
    parts = [f"# {section.name}", findings_markdown(section.results)]
    if caption:
        picture = f"![{section.name}]({section.name}.png)"
        parts += [picture, "\n".join(f"- {line}" for line in caption)]
    parts += [
        "## Verdicts",
        count_markdown(section),
        fixed_before(verdict for _, verdict in section.verdicts()),
        "The paper's values were measured on larger models of its own.",
        verdict_markdown(section),
        "## Experiments",
        markdown_table(("experiment", "question", "command"), rows),
        "Runs: " + ", ".join(f"{result.config.name} {result.hash[:SHORT_HASH]}" for result in section.results) + ".",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _draw(axes: Axes, result: RunResult, models: Sequence[str]) -> None:
    # Every axes gets all models of the figure, so that each has the same colour in all of them.
    own = dict(zip(result.models, panels(result), strict=True))
    drawn = [own.get(model, Panel(short(model))) for model in models]
    if not any(panel.effects for panel in drawn):
        axes.set_axis_off()
        why = "\n".join(f"{short(model.name)}: {model.status}" for model in result.models.values())
        axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=COLORS["grey"])
        return
    make_probe(result.config).read_by().draw_main(axes, drawn)
    axes.title.set_fontsize(_TITLE * min(1.0, _TITLE_FITS / max(1, len(axes.get_title()))))


def _name(axes: Axes, letter: str, result: RunResult) -> None:
    """The letter and, since several experiments may share a probe, the experiment's name above the title."""
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(letter, (0, 1), (-34, 16), fontsize=14, fontweight="bold", color=COLORS["ink"], **style)
    axes.annotate(result.config.name, (0, 1), (-14, 18), fontsize=8, color=COLORS["grey"], **style)


def _add_key(figure: Figure, models: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    paper = Line2D([], [], marker="D", ls="", ms=6, mfc="none", mec=COLORS["ink"], label="the paper's value")
    drawn = [
        Line2D([], [], marker="o", ms=6, lw=2, color=color_of(number), label=model)
        for number, model in enumerate(models)
    ]
    widest = max(len(str(handle.get_label())) for handle in (*drawn, paper))
    columns = int(figure.get_figwidth() / (_KEY_MARK + _KEY_LETTER * widest))
    figure.legend(handles=[*drawn, paper], loc="outside lower center", ncols=max(1, min(columns, len(drawn) + 1)))
