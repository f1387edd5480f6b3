"""A probe's figure as data, and the two functions that draw any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvprobe.figures.panel import Panel
from kvprobe.figures.style import panel_grid, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Key = Callable[[Sequence[Panel]], list[Any]]
"""Legend handles for the models of a figure."""


class Part(Protocol):
    """A row of a figure, one axes for each model: `Bars`, `Doses`, `Profiles`, `Rates` or a probe's own.

    A part may have `ylim` too, the ends of the vertical axis that its models share; `None` is an end the data choose.
    """

    @property
    def ylabel(self) -> str:
        """Of the leftmost axes."""
        ...

    @property
    def height(self) -> float:
        """Of the row, in inches."""
        ...

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw one model that was measured."""
        ...

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """Legend handles."""
        ...


class Main(Protocol):
    """The one axes that a probe has in its section's figure: `EffectsByModel`, `DosesByModel` or a probe's own."""

    @property
    def title(self) -> str:
        """The finding, in a few words."""
        ...

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw all models."""
        ...


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class FigureSpec:
    """A probe's figure: parts from top to bottom, a column for each model.

    Args:
        title: the question that the figure answers.
        parts: its rows; a function where they depend on what was measured, such as one for each size.
        main: its axes in the section's figure; `None` for none.
        key: legend handles, where they are not those of the parts.
        key_title: a sentence above the legend.
        key_beside: a title for each part, where colours mean different things in different parts: each has a legend of
            its own beside it, and the common one holds only what several parts share.
        key_columns: of the legend; the narrow figure of a single model has two at most.
    """

    title: str
    parts: Parts | Callable[[Sequence[Panel]], Parts]
    main: Main | None = None
    key: Key | None = None
    key_title: str | None = None
    key_beside: tuple[str, ...] = ()
    key_columns: int = 4


def draw(spec: FigureSpec, panels: Sequence[Panel]) -> Figure:
    """The figure of a probe: a row for each part, a column for each model."""
    parts = spec.parts(panels) if callable(spec.parts) else spec.parts
    with styled():
        figure, grid = panel_grid(panels, heights=[part.height for part in parts])
        for part, row in zip(parts, grid, strict=True):
            for axes, panel in zip(row, panels, strict=True):
                if panel.effects:
                    part.draw(axes, panel)
            row[0].set_ylabel(part.ylabel)
            # Last, for an axis whose limits are set does not follow the models drawn after.
            if limits := getattr(part, "ylim", None):
                row[0].set_ylim(*limits)
        figure.suptitle(spec.title, fontsize=11)
        if any(panel.effects for panel in panels):
            handles = spec.key(panels) if spec.key else _handles(parts, panels)
            if spec.key_beside:
                handles = _beside(parts, spec.key_beside, panels, [row[-1] for row in grid])
            columns = spec.key_columns if len(panels) > 1 else min(2, spec.key_columns)
            figure.legend(handles=handles, loc="outside lower center", ncols=columns, title=spec.key_title)
    return figure


def _handles(parts: Parts, panels: Sequence[Panel]) -> list[Any]:
    """Those of all parts, each label once."""
    by_label = {handle.get_label(): handle for part in parts for handle in part.handles(panels)}
    return list(by_label.values())


def _beside(parts: Parts, titles: Sequence[str], panels: Sequence[Panel], axes: Sequence[Axes]) -> list[Any]:
    """Draw the legend of each part to the right of its last axes; returns what several parts share."""
    by_part = [{handle.get_label(): handle for handle in part.handles(panels)} for part in parts]
    every = {label: handle for part in by_part for label, handle in part.items()}
    shared = {label: handle for label, handle in every.items() if sum(label in part for part in by_part) > 1}
    for title, last, handles in zip(titles, axes, by_part, strict=True):
        own = [handle for label, handle in handles.items() if label not in shared]
        if own:
            last.legend(handles=own, title=title, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7.5)
    return list(shared.values())
