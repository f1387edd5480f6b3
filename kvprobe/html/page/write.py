"""Writes the report page."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvprobe.figures.style import write_svg
from kvprobe.html.page.charts import themes
from kvprobe.html.page.data import ExperimentData, experiment_data
from kvprobe.html.templating import asset, render, title_of
from kvprobe.report.counts import CHANGED, TITLES, by_kind, count_sentence, counted, fixed_before
from kvprobe.report.findings import TITLE, findings
from kvprobe.report.section_figure import argument, draw_page, sample_of
from kvprobe.report.section_tables import ALIKE, HEADLINE, LOST, groups, p_text, without_checks
from kvprobe.report.tables import interval, number, short
from kvprobe.report.write import write_text
from kvprobe.runs.claims import Outcome, Verdict
from kvprobe.runs.results import CONFIG, Failure, RunResult, Status, failure_of, find_runs, load_result
from kvprobe.runs.section import SectionResult, sections_of
from kvprobe.runs.store import SHORT_HASH

PAGE_FILE = "report.html"


@dataclass(frozen=True)
class Line:
    """A verdict as the page's table shows it.

    Args:
        experiment: its name.
        section: its section's name.
        verdict: on one model.
        effect: place of the number it was read from among those of the experiment; `None` where there is none.
        linked: whether the page shows the experiment.
    """

    experiment: str
    section: str
    verdict: Verdict
    effect: int | None
    linked: bool

    @property
    def cells(self) -> dict[str, Any]:
        """Texts, and numbers to sort by."""
        verdict, effect = self.verdict, self.verdict.effect
        return {
            "model": short(verdict.model),
            "paper": "–" if verdict.paper_value is None else number(verdict.paper_value),
            "ours": "–" if effect is None else interval(effect),
            "estimate": None if effect is None else effect.estimate,
            "p": p_text(verdict.p_adjusted),
            "word": verdict.word,
            "kind": TITLES[verdict.kind],
        }


@dataclass(frozen=True)
class Page:
    """A written page, and what of it could not be made."""

    path: Path
    failures: tuple[Failure, ...]


def load_newest(folder: Path) -> tuple[list[RunResult], list[Failure]]:
    """The newest finished run of each experiment under `folder`, and a failure for each damaged or unfinished one."""
    newest = {run.parent.name: run for run in find_runs(folder)}
    found, failures = [], []
    for name, run in newest.items():
        try:
            found.append(load_result(run))
        except Exception as error:
            failures.append(failure_of(name, error))
    begun = {file.parent.parent.name for file in folder.glob(f"*/*/{CONFIG}")} - set(newest)
    unfinished = "No run has finished yet; run it again (finished cells are kept)."
    failures += [Failure(name, unfinished) for name in begun]
    return found, sorted(failures, key=lambda failure: failure.experiment)


def write_page(results: Sequence[RunResult], folder: Path, failures: Sequence[Failure] = ()) -> Page:
    """Write `report.html` into `folder`: verdicts, figures and provenance of finished runs, in one file.

    Args:
        results: the runs, which lie under `folder`.
        folder: of all results.
        failures: of experiments that have no result; each becomes a sentence on the page.

    Raises:
        StoreError: the folder cannot be written.
    """
    told = list(failures)
    html = page_html(sections_of(results), folder, told)
    return Page(write_text(folder / PAGE_FILE, html), tuple(told[len(failures) :]))


def page_html(sections: Sequence[SectionResult], folder: Path, failures: list[Failure]) -> str:
    """The page's text; an experiment that cannot be shown is added to `failures` and told of on the page."""
    lines: list[Line] = []
    shown = [
        {
            "name": section.name,
            "findings": findings(section.results),
            "experiments": list(_shown(section, folder, lines, failures)),
        }
        for section in sections
    ]
    return render(
        "page/page",
        sections=shown,
        lines=sorted(lines, key=lambda line: list(TITLES).index(line.verdict.kind)),
        counts=_counted(lines),
        counted=count_sentence(line.verdict for line in lines),
        kinds=[TITLES[kind] for kind, _ in by_kind(line.verdict for line in lines)],
        models=list(dict.fromkeys(line.verdict.model for line in lines)),
        figure=_figure(sections, failures),
        failures=failures,
        found=TITLE,
        headline=HEADLINE,
        lost=LOST,
        alike=ALIKE,
        changed=CHANGED,
        fixed=fixed_before(line.verdict for line in lines),
        themes=_json(themes()),
        plotly=_plotly(),
        style=asset("page.css"),
        script=asset("page.js"),
    )


def _figure(sections: Sequence[SectionResult], failures: list[Failure]) -> dict[str, Any] | None:
    """The main figure of all sections as an image, with its caption; `None` where no experiment belongs to it."""
    if not (shown := argument(sections)):
        return None
    models = list(dict.fromkeys(model for section in sections for result in section.results for model in result.models))
    page, svg = draw_page("main", shown, models, failures), io.BytesIO()
    write_svg(page.figure, svg)
    names = [(result.config.name, result.config.question) for result in page.results]
    return {"svg": base64.b64encode(svg.getvalue()).decode(), "names": names}


def _shown(
    section: SectionResult, folder: Path, lines: list[Line], failures: list[Failure]
) -> Iterator[dict[str, Any]]:
    """What the template shows of each experiment; its verdicts go to `lines`, also where it cannot be shown."""
    models = list(dict.fromkeys(model for result in section.results for model in result.models))
    judged = section.verdicts()
    for result in section.results:
        verdicts = [verdict for of, verdict in judged if of is result]
        try:
            made = experiment_data(result, verdicts, models, folder)
            shown = _experiment(result, verdicts, made)
        except Exception as error:
            failures.append(failure_of(result.config.name, error))
            lines += [Line(result.config.name, section.name, verdict, None, linked=False) for verdict in verdicts]
        else:
            lines += [
                Line(result.config.name, section.name, verdict, _place_of(verdict, made.places), linked=True)
                for verdict in verdicts
            ]
            yield shown


def _experiment(result: RunResult, verdicts: Sequence[Verdict], made: ExperimentData) -> dict[str, Any]:
    """What the page's template shows of an experiment."""
    problems = [*filter(None, [result.altered]), *made.problems]
    svg = result.folder / f"{result.config.name}.svg"
    try:
        figure = _packed(svg.read_bytes())
    except OSError:
        figure = ""
        problems.append(f"The figure {svg.name} is missing; `kvprobe report` draws it.")
    return {
        "name": result.config.name,
        "question": result.config.question,
        "sample": sample_of(result),
        "hash": result.hash[:SHORT_HASH],
        "charts": [chart["label"] for chart in made.values["charts"]],
        "height": made.height,
        "packed": _packed(_json(made.values).encode()),
        "unmeasured": [model for model in result.models.values() if model.told != Status.MEASURED],
        "counts": Counter(verdict.outcome for verdict in verdicts),
        "figure": figure,
        "problems": problems,
    }


def _counted(lines: Sequence[Line]) -> list[tuple[str, Counter[Outcome], int]]:
    """Verdicts by kind; without checks by section, by model and altogether; each with what adjustment takes away."""
    of_sections: dict[str, list[Verdict]] = {}
    for line in lines:
        of_sections.setdefault(title_of(line.section), []).append(line.verdict)
    verdicts = [line.verdict for line in lines]
    found = {**groups(verdicts, of_sections), "all but checks": without_checks(counted(verdicts))}
    return [
        (name, Counter(verdict.outcome for verdict in own), sum(not verdict.survives for verdict in own))
        for name, own in found.items()
    ]


def _place_of(verdict: Verdict, places: Mapping[tuple[str, str], int]) -> int | None:
    return places.get((verdict.model, verdict.effect.name)) if verdict.effect else None


def _json(values: Any) -> Markup:
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Neither `</script` nor `<!--` may end the script element that it stands in.
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


@cache
def _plotly() -> str:
    """The plotting library, packed: a third of its size, and read only when a figure comes into view."""
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs().encode())


def _packed(content: bytes) -> str:
    """Bytes that the page's `unpack` reads; the same for the same content."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()
