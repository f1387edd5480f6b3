"""The figure of the heads probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.legacy.doses import dose_axis, dose_key, draw_dose, levels, sizes_of
from kvprobe.figures.legacy.figures import COLORS, panel_grid, styled
from kvprobe.figures.legacy.models import model_color
from kvprobe.figures.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Curves = dict[str, tuple[str, str, str]]
"""Label, colour and line of each curve, by the name of its sets."""
_READ: _Curves = {
    "read_in_sample": ("ranked on the\npair itself", COLORS["sky"], "-"),
    "read_held_out": ("ranked on\nother skeletons", COLORS["blue"], "-"),
    "read_notes": ("these, reading\nthe notes alone", COLORS["green"], "--"),
    "read_matched": ("others of the\nsame layers", COLORS["orange"], "-"),
}
_KEPT: _Curves = {
    "ablate_held_out": ("top read heads\nablated", COLORS["vermilion"], "-"),
    "ablate_others": ("all but them\nablated", COLORS["purple"], "-"),
}
_WRITE: _Curves = {
    "write_held_out": ("query heads,\nall positions", COLORS["vermilion"], "-"),
    "write_one": ("query heads,\none position", COLORS["purple"], "-"),
    "kv_held_out": ("key-value heads,\nall positions", COLORS["green"], "--"),
}


def draw_heads(panels: Sequence[Panel]) -> Figure:
    """Read heads, what ablation leaves, write heads, and effect against attention; one column for each model."""
    with styled():
        figure, (read, kept, write, single) = panel_grid(panels, heights=(2.3, 1.8, 2.0, 2.0))
        for column, panel in enumerate(panels):
            if not panel.effects:
                continue
            for axes, curves, metric in (
                (read[column], _READ, "recovery"),
                (kept[column], _KEPT, "gap_retained"),
                (write[column], _WRITE, "recovery"),
            ):
                levels(axes, 0.0, 1.0)
                for selection, (_, color, line) in curves.items():
                    draw_dose(axes, panel, selection, metric, color=color, ls=line)
                dose_axis(axes, sizes_of(panel, "read_held_out", "recovery"), "heads")
            _draw_single(single[column], panel)
        read[0].set_ylabel("recovery of\nthe new decision")
        kept[0].set_ylabel("share of the\ngap retained")
        write[0].set_ylabel("recovery of\nthe new decision")
        single[0].set_ylabel("recovery,\none head alone")
        figure.suptitle("Which attention heads read the notes, and which write them?", fontsize=11)
        for row, title, curves in (
            (read, "read heads", _READ),
            (kept, "mean of others", _KEPT),
            (write, "written", _WRITE),
        ):
            _key(row[-1], title, curves)
        figure.legend(
            handles=dose_key({}, paper=any(panel.paper for panel in panels)), loc="outside lower center", ncols=2
        )
    return figure


def _key(axes: Axes, title: str, curves: _Curves) -> None:
    """The key of one row, to its right: colours mean other things in other rows."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], marker="o", ms=3.5, color=c, ls=line, label=label) for label, c, line in curves.values()]
    axes.legend(handles=handles, title=title, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7.5)


def _draw_single(axes: Axes, panel: Panel) -> None:
    """Each head's effect against its attention to the notes; the three strongest by name."""
    heads = panel.rows[panel.rows["measurement"] == "head"]
    sums = heads.assign(shift=heads["margin"] - heads["m_base"], gap=heads["m_donor"] - heads["m_base"])
    found = sums.groupby(["layer", "head"]).agg({"shift": "sum", "gap": "sum", "attention": "mean"})
    recovery = found["shift"] / found["gap"]
    levels(axes, 0.0)
    axes.plot(found["attention"], recovery, "o", ms=4, mew=0, alpha=0.7, color=COLORS["blue"])
    names = ", ".join(f"{int(layer)}.{int(head)}" for layer, head in recovery.nlargest(3).index)
    axes.text(0.04, 0.95, f"strongest (layer.head):\n{names}", transform=axes.transAxes, va="top", fontsize=7)
    axes.set_xlabel("attention to held-out notes")


def heads_panel(axes: Axes, panels: Sequence[Panel]) -> None:
    """Read heads ranked on other skeletons, all models; crosses: as many heads of the same layers."""
    measured = [panel for panel in panels if panel.effects]
    levels(axes, 0.0, 1.0)
    for panel in measured:
        color = model_color(panels, panel)
        draw_dose(axes, panel, "read_held_out", "recovery", color=color, label=panel.model)
        draw_dose(axes, panel, "read_matched", "recovery", color=color, marker="x", ms=6)
        dose_axis(axes, sizes_of(panel, "read_held_out", "recovery"), "read heads")
    axes.set_ylabel("recovery")
    axes.set_title("Read heads, held-out top k; x: matched k")
