"""The figures of a section: its argument in a few panels, the other experiments on pages of a supplement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from kvprobe.figures.by_model import color_of, marker_of
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS, styled
from kvprobe.report.tables import short
from kvprobe.report.write import panels
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.results import Failure, RunResult, Status, failure_of
from kvprobe.runs.section import SectionResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 6
_WIDTH, _HEIGHT, _COLUMNS = 6.5, 2.25, 2
"""Of a page, which is as wide as the text of a paper, and of one of its rows, in inches."""
_TITLE, _TITLE_FITS = 8.5, 40
"""Size of a title, and how many characters of it fit above one axes; longer ones are set smaller."""
_KEY_MARK, _KEY_LETTER = 0.55, 0.068
"""Width in the key of a mark with the gaps around it, and of a letter, in inches."""
_SIZES = {
    "font.size": 8,
    "axes.titlesize": _TITLE,
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Page:
    """One figure of a section.

    Args:
        name: of its files.
        results: the experiments it shows.
        figure: a panel for each.
        caption: a line for each.
    """

    name: str
    results: tuple[RunResult, ...]
    figure: Figure
    caption: tuple[str, ...]


def pages_of(section: SectionResult, failures: list[Failure]) -> list[Page]:
    """The main figure of a section and the pages of its supplement.

    Experiments without a measured model have no panel. Where none has a step in an argument, the first are the main
    figure.

    Args:
        section: the finished experiments.
        failures: a panel that cannot be drawn is added to them.
    """
    models = list(dict.fromkeys(model for result in section.results for model in result.models))
    drawn = [result for result in section.results if _drawn(result)]
    main = argument([section]) or drawn[:MOST_PANELS]
    others = [result for result in drawn if result not in main]
    groups = {section.name: main} if main else {}
    for number, first in enumerate(range(0, len(others), MOST_PANELS), 1):
        groups[f"{section.name}_supplement_{number}"] = others[first : first + MOST_PANELS]
    return [draw_page(name, results, models, failures) for name, results in groups.items()]


def argument(sections: Sequence[SectionResult]) -> list[RunResult]:
    """The experiments of the main figure, by their step in the argument.

    Of several sections the first step of each, filled up with further ones of the first.
    """
    by_section = [
        sorted((result for result in section.results if _step(result) and _drawn(result)), key=_step)
        for section in sections
    ]
    by_section = [steps for steps in by_section if steps]
    if not by_section:
        return []
    first = by_section[0][: max(1, MOST_PANELS - len(by_section) + 1)]
    return [*first, *(steps[0] for steps in by_section[1:])][:MOST_PANELS]


def draw_page(name: str, results: Sequence[RunResult], models: Sequence[str], failures: list[Failure]) -> Page:
    """One axes with a letter for each experiment, and the caption, a line for each.

    Args:
        name: of the page.
        results: experiments with a panel.
        models: of the section, whose order gives each its colour and its marker.
        failures: a panel that cannot be drawn is added to them.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(results))
    rows = -(-len(results) // columns)
    caption: list[str] = []
    titles: set[str] = set()
    with styled(), rc_context(_SIZES):
        figure = Figure(figsize=(_WIDTH, rows * _HEIGHT + 0.5), layout="constrained")
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for result, letter, axes in zip(results, ascii_uppercase, grid, strict=False):
            try:
                _draw(axes, result, models)
            except Exception as error:
                failures.append(failure_of(result.config.name, error))
                axes.clear()
                axes.set_axis_off()
            if axes.get_title() in titles:
                axes.set_title(result.config.name)
            titles.add(axes.get_title())
            axes.title.set_fontsize(_TITLE * min(1.0, _TITLE_FITS / max(1, len(axes.get_title()))))
            axes.annotate(letter, (0, 1), (-26, 5), fontsize=11, fontweight="bold", color=COLORS["ink"], **_OUTSIDE)
            caption.append(f"**{letter}**, {result.config.name}: {result.config.question} {sample_of(result)}")
        for axes in grid[len(results) :]:
            axes.remove()
        _add_key(figure, [model for model in models if any(_measured(result, model) for result in results)], models)
    return Page(name, tuple(results), figure, tuple(caption))


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
        grade = f" ({model.gate.grade})" if model.margin_only else ""
        counts.append(f"{short(model.name)} {model.gate.included} of {model.gate.generated} pairs, {clusters}{grade}")
    used = {verdict.effect.method for verdict in result.verdicts if verdict.effect}
    kinds = ", ".join(sorted(used - {"exact"})) or "none"
    return f"n: {'; '.join(counts)}. Intervals: {result.config.statistics.confidence:.0%}, {kinds}."


_OUTSIDE: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}


def _step(result: RunResult) -> int:
    return make_probe(result.config).read_by().step if result.config.name == result.config.probe else 0


def _drawn(result: RunResult) -> bool:
    return any(_measured(result, model) for model in result.models) and make_probe(result.config).read_by().has_main


def _draw(axes: Axes, result: RunResult, models: Sequence[str]) -> None:
    # Every axes gets all models of the figure, so that each has the same colour in all of them.
    own = dict(zip(result.models, panels(result), strict=True))
    make_probe(result.config).read_by().draw_main(axes, [own.get(model, Panel(short(model))) for model in models])


def _measured(result: RunResult, model: str) -> bool:
    return model in result.models and result.models[model].status is Status.MEASURED


def _add_key(figure: Figure, shown: Sequence[str], models: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    paper = Line2D([], [], marker="D", ls="", ms=5, mfc="none", mec=COLORS["ink"], label="the paper's value")
    places = [(models.index(model), short(model)) for model in shown]
    drawn = [
        Line2D([], [], marker=marker_of(place), ms=5, lw=1.5, color=color_of(place), label=model)
        for place, model in places
    ]
    widest = max(len(str(handle.get_label())) for handle in (*drawn, paper))
    columns = int(figure.get_figwidth() / (_KEY_MARK + _KEY_LETTER * widest))
    figure.legend(handles=[*drawn, paper], loc="outside lower center", ncols=max(1, min(columns, len(drawn) + 1)))
