"""One figure of a run: by how much others take longer, on a logarithmic axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.contestants.base import REFERENCE
from benchmarks.results import Report, SweepLine
from kvprobe.figures.style import COLORS, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "cache_clone": COLORS["sky"],
    "transformer_lens": COLORS["vermilion"],
    "nnsight": COLORS["orange"],
    "full_forward": COLORS["blue"],
}
_WIDTH = 0.8


def draw(report: Report) -> Figure:
    """A row of panels for each model, a column for each sweep; bars by prompt length, quartiles as whiskers."""
    from matplotlib.figure import Figure

    measured = [line for line in report.sweeps if line.ratio and line.contestant != REFERENCE]
    models = list(dict.fromkeys(line.model for line in measured))
    sweeps = list(dict.fromkeys(line.sweep for line in measured))
    names = list(dict.fromkeys((line.contestant, line.label) for line in measured))
    with styled():
        figure = Figure(figsize=(1.4 + 2.5 * len(sweeps), 0.9 + 2.3 * len(models)), layout="constrained")
        grid = figure.subplots(len(models), len(sweeps), squeeze=False, sharey=True)
        for row, model in enumerate(models):
            for column, sweep in enumerate(sweeps):
                axes = grid[row][column]
                here = [line for line in measured if (line.model, line.sweep) == (model, sweep)]
                _panel(axes, here, [name for name, _ in names])
                if row == 0:
                    axes.set_title(f"{sweep} sweep")
                if column == 0:
                    axes.set_ylabel(f"{model}\ntimes kvprobe's seconds")
                if row == len(models) - 1:
                    axes.set_xlabel("tokens of the prompt")
        _legend(figure, names)
    return figure


def _panel(axes: Axes, lines: list[SweepLine], names: list[str]) -> None:
    lengths = sorted({line.tokens for line in lines})
    width = _WIDTH / max(1, len(names))
    for line in lines:
        if line.ratio is None:
            continue
        place = lengths.index(line.tokens) + (names.index(line.contestant) - (len(names) - 1) / 2) * width
        # From 1 up or down: what lies below is faster than kvprobe.
        axes.bar(
            place, line.ratio.median - 1, width * 0.92, bottom=1, color=_COLORS.get(line.contestant, COLORS["grey"])
        )
        axes.plot([place, place], [line.ratio.low, line.ratio.high], color=COLORS["ink"], lw=1.0)
    axes.axhline(1.0, color=COLORS["ink"], lw=1.0)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.tick_params(axis="x", length=0)


def _legend(figure: Figure, names: list[tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[object] = [Patch(color=_COLORS.get(name, COLORS["grey"]), label=label) for name, label in names]
    handles.append(Line2D([], [], color=COLORS["ink"], lw=1.0, label="quartiles; line at 1: kvprobe itself"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
