"""How every figure of kvprobe looks, and the pieces that figures are made of."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvprobe.errors import StoreError
from kvprobe.probes.base import Panel
from kvprobe.stats import Effect

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
# Half the width of an effect on its axis, where effects stand 1 apart.
_HALF = 0.27
_PAPER_MARKER: dict[str, Any] = {"marker": "D", "ls": "", "ms": 6, "mfc": "white", "mec": COLORS["ink"], "mew": 1.3}
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
        grid[0][column].set_title(panel.model, pad=16 if any(panel.paper for panel in panels) else 6)
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


def first_measured(panels: Sequence[Panel]) -> int | None:
    """The column whose lines a legend can show; `None` where no model was measured."""
    return next((column for column, panel in enumerate(panels) if panel.effects), None)


def draw_effects(axes: Axes, panel: Panel, names: Mapping[str, tuple[str, str]], dots: Mapping[str, pd.Series]) -> None:
    """Effects side by side, each with its interval, its clusters as dots and the paper's value.

    Args:
        axes: to draw on.
        panel: the model.
        names: of the effects, with the label on the axis and the colour.
        dots: by effect, a value for each cluster.
    """
    for place, (name, (_, color)) in enumerate(names.items()):
        if name in dots:
            spread = np.linspace(-_HALF, _HALF, len(dots[name])) if len(dots[name]) > 1 else np.zeros(1)
            order = np.random.Generator(np.random.PCG64(0)).permutation(len(spread))
            axes.plot(place + spread[order], dots[name], "o", ms=3, mew=0, color=color, alpha=0.4, zorder=2)
        if name in panel.effects:
            _draw_interval(axes, place, panel.effects[name], color)
        if name in panel.paper:
            axes.plot(place + 0.38, panel.paper[name], zorder=5, clip_on=False, **_PAPER_MARKER)
    axes.set_xlim(-0.55, len(names) - 0.45)
    axes.set_xticks(range(len(names)), [label for label, _ in names.values()])
    axes.tick_params(axis="x", length=0)


def recovery_by_skeleton(rows: pd.DataFrame, shift: pd.Series | None = None) -> pd.Series:
    """Each skeleton's recovery as ratio of sums, for the dots of `draw_effects`.

    `rows` has `skeleton`, `margin`, `m_base` and `m_donor` (logits); `shift`, where it is not margin - m_base.
    """
    moved = rows["margin"] - rows["m_base"] if shift is None else shift
    sums = rows.assign(shift=moved, gap=rows["m_donor"] - rows["m_base"])
    totals = sums.groupby("skeleton")[["shift", "gap"]].sum()
    return totals["shift"] / totals["gap"]


def draw_profile(axes: Axes, profiles: Mapping[str, tuple[pd.Series, str, str]]) -> None:
    """Lines over layers.

    Args:
        axes: to draw on.
        profiles: by label, values indexed by layer, the colour and the marker.
    """
    for label, (values, color, marker) in profiles.items():
        axes.plot(values.index, values, color=color, marker=marker, ms=4, lw=1.5, label=label, clip_on=False, zorder=3)
    layers = max((len(values) for values, _, _ in profiles.values()), default=1)
    axes.set_xticks(range(0, layers, max(1, layers // 6)))
    axes.set_xlabel("layer")


def effect_key(dots: str) -> list[Any]:
    """Legend handles of `draw_effects`; `dots` says what a dot is."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], lw=1.6, color=COLORS["ink"], label="estimate"),
        Patch(color=COLORS["ink"], alpha=0.3, lw=0, label="its interval"),
        Line2D([], [], marker="o", ls="", ms=4, mew=0, color=COLORS["ink"], alpha=0.35, label=dots),
        Line2D([], [], label="the paper's value", **_PAPER_MARKER),
    ]


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
            figure.savefig(svg, facecolor="white", metadata={"Date": None, "Identifier": ", ".join(metadata.values())})
    except OSError as error:
        raise StoreError(f"The figure {png} cannot be written ({error.strerror}); choose another folder.") from error
    return [png, svg]


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


def _draw_interval(axes: Axes, place: float, effect: Effect, color: str) -> None:
    from matplotlib.patches import Rectangle

    # An unbounded end must leave the picture and not stretch its axis, so the axis learns of finite ends only.
    low, high = max(effect.low, -1e6), min(effect.high, 1e6)
    axes.add_artist(Rectangle((place - _HALF, low), 2 * _HALF, high - low, color=color, alpha=0.35, lw=0, zorder=3))
    axes.update_datalim([(place, end) for end in (effect.low, effect.high) if np.isfinite(end)] or [(place, 0.0)])
    ends = [place - _HALF, place + _HALF]
    axes.plot(ends, [effect.estimate] * 2, color=color, lw=1.6, zorder=4, solid_capstyle="butt")
