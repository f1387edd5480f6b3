"""How every figure of kvprobe looks: colours, style, a grid with a column for each model, files."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvprobe.errors import StoreError
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008): told apart with every kind of colour vision, and in grey by lightness.
COLORS = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "sky": "#56B4E9",
    "orange": "#E69F00",
    "purple": "#CC79A7",
    "grey": "#7F7F7F",
    "ink": "#222222",
}
PAPER_MARKER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mec": COLORS["ink"], "mew": 1.3}
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLORS["ink"],
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    # Ids inside an SVG are random without it, and the same result must give the same bytes.
    "svg.hashsalt": "kvprobe",
}


@contextmanager
def styled() -> Iterator[None]:
    """The style of kvprobe's figures, which needs no display and leaves the user's own settings alone."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def panel_grid(panels: Sequence[Panel], heights: Sequence[float]) -> tuple[Figure, list[list[Axes]]]:
    """A figure with one column for each model, titled with its name.

    Args:
        panels: the models.
        heights: of the rows, in inches.

    Returns:
        The figure and its axes as `[row][column]`. A column without effects says why instead.
    """
    from matplotlib.figure import Figure

    width = max(6.4, 1.0 + 2.6 * len(panels))
    figure = Figure(figsize=(width, sum(heights) + 0.9), layout="constrained")
    grid = figure.subplots(
        len(heights), len(panels), squeeze=False, sharey="row", gridspec_kw={"height_ratios": list(heights)}
    )
    for column, panel in enumerate(panels):
        graded = f"{panel.model}, {panel.note}" if panel.effects and panel.note else panel.model
        grid[0][column].set_title(graded, pad=16 if any(panel.paper for panel in panels) else 6)
        if panel.effects and panel.paper:
            _below_title(grid[0][column], f"beside the paper's {panel.paper_model}")
        if not panel.effects:
            for axes in grid[:, column]:
                axes.set_axis_off()
            note = "\n".join(textwrap.wrap(panel.note or "not measured", 26))
            grid[0][column].text(
                0.5, 0.5, note, ha="center", va="center", transform=grid[0][column].transAxes, color=COLORS["grey"]
            )
    return figure, [list(row) for row in grid]


def levels(axes: Axes, *heights: float) -> None:
    """Dashed lines at reference heights."""
    for height in heights:
        axes.axhline(height, color=COLORS["ink"], lw=0.8, ls=(0, (4, 3)), zorder=1)


def save_figure(figure: Figure, stem: Path, metadata: Mapping[str, str]) -> list[Path]:
    """Write `stem`.png and `stem`.svg, the same bytes for the same figure; returns both paths.

    Raises:
        StoreError: the folder cannot be written.
    """
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with styled():
            # Laid out once, for every file would lay it out again, which takes most of the time.
            figure.draw_without_rendering()
            figure.set_layout_engine(None)
            figure.savefig(png, dpi=200, facecolor="white", metadata={"Software": None, **metadata})
            write_svg(figure, svg, ", ".join(metadata.values()))
    except OSError as error:
        raise StoreError(f"The figure {png} cannot be written ({error.strerror}); choose another folder.") from error
    return [png, svg]


def write_svg(figure: Figure, file: Path | BinaryIO, identifier: str = "") -> None:
    """Write a figure as SVG, the same bytes for the same figure."""
    with styled():
        figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None, "Identifier": identifier})


def _below_title(axes: Axes, text: str) -> None:
    axes.annotate(
        text,
        (0.5, 1.0),
        (0, 4),
        "axes fraction",
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=COLORS["grey"],
    )
