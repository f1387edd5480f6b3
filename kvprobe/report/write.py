"""Writes a run's report beside its results: the figure and a summary in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvprobe.errors import StoreError
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import save_figure
from kvprobe.report.counts import fixed_before
from kvprobe.report.reference import paper_model, paper_values
from kvprobe.report.tables import interval, markdown_table, short, verdict_markdown
from kvprobe.runs.explain import command_of, figure_metadata
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.results import RunResult, Status
from kvprobe.runs.store import SHORT_HASH, write_atomically
from kvprobe.viewing import visible

SUMMARY_FILE = "report.md"


@dataclass(frozen=True)
class Report:
    """The files of a run's report."""

    figures: tuple[Path, ...]
    summary: Path


def write_report(result: RunResult) -> Report:
    """Write `<experiment>.png`, `.svg` and `report.md` into the run's folder.

    Raises:
        StoreError: the folder cannot be written, or its rows cannot be read.
        UnknownNameError: the run's probe is not installed.
    """
    figure = make_probe(result.config).read_by().draw(panels(result))
    figures = save_figure(figure, result.folder / result.config.name, figure_metadata(result))
    summary = write_text(result.folder / SUMMARY_FILE, summary_markdown(result))
    return Report(tuple(figures), summary)


def panels(result: RunResult) -> list[Panel]:
    """What a plot shows of each model of a run."""
    entries = make_probe(result.config).read_by().paper
    rows = result.rows()
    drawn = []
    for model in result.models.values():
        own = rows[(rows["model"] == model.name) & rows["included"]] if "included" in rows else rows
        reference = paper_model(model.name, str(model.identity.get("architecture", "")))
        measured = model.status is Status.MEASURED
        drawn.append(
            Panel(
                model=short(model.name),
                effects={effect.name: effect for effect in model.effects} if measured else {},
                rows=own.reset_index(drop=True),
                paper=paper_values(entries, reference),
                paper_model=reference,
                note=("margin only" if model.margin_only else "") if measured else f"{model.status}: {model.reason}",
            )
        )
    return drawn


def summary_markdown(result: RunResult) -> str:
    """A run's summary: question, figure, verdicts, models, effects, and how to make it again."""
    config = result.config
    models, effects = [], []
    for model in result.models.values():
        models.append((short(model.name), model.told, model.reason, _identity(model.identity)))
        for effect in model.effects:
            counts = str(effect.n), str(effect.clusters), str(effect.excluded)
            effects.append((effect.name, short(model.name), interval(effect), effect.unit, *counts, effect.method))
    parts = [
        f"# {config.name}",
        config.question,
        f"![{config.name}]({config.name}.png)",
        "## Claims",
        f"{fixed_before(result.verdicts)} The paper's values were measured on larger models of its own.",
        verdict_markdown(result) if result.verdicts else "The experiment makes no claims.",
        "## Models",
        markdown_table(("model", "status", "what happened", "identity"), models),
        "## Effects",
        markdown_table(("effect", "model", "value", "unit", "n", "clusters", "excluded", "interval"), effects),
        "## Reproduce",
        f"    {command_of(result)}\n\nExperiment {result.hash[:SHORT_HASH]}; rows in `rows.parquet`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_index(results: Sequence[RunResult], folder: Path) -> Path:
    """Write `report.md` into `folder`: all verdicts of the runs in it, with links to their reports.

    Raises:
        StoreError: the folder cannot be written.
    """
    parts = ["# Results"]
    for result in results:
        link = (result.folder / SUMMARY_FILE).relative_to(folder)
        picture = f"![{result.config.name}]({link.parent}/{result.config.name}.png)"
        parts += [f"## [{result.config.name}]({link})", result.config.question, picture, verdict_markdown(result)]
    return write_text(folder / SUMMARY_FILE, "\n\n".join(part for part in parts if part) + "\n")


def _identity(identity: dict[str, object]) -> str:
    if not identity:
        return "–"
    weights = str(identity.get("weights_sha256", ""))[:SHORT_HASH]
    return f"{identity.get('architecture')}, weights {weights}, {identity.get('dtype')}, {identity.get('attention')}"


def write_text(path: Path, text: str) -> Path:
    """Write a file of a report.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        return write_atomically(path, visible(text).encode())
    except OSError as error:
        raise StoreError(f"The report {path} cannot be written ({error.strerror}); choose another folder.") from error
