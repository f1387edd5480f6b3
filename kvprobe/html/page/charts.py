"""The page's charts as plotly figures: a line for each effect with its interval, the models below each other.

A chart holds no colours of the page: these are in a template for light and one for dark (`themes`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvprobe.figures.by_model import color_of
from kvprobe.html.page.views import View, regions_of
from kvprobe.html.style import PALETTES
from kvprobe.report.section_tables import HEADLINE
from kvprobe.report.tables import interval
from kvprobe.runs.claims import Claim
from kvprobe.stats import Effect

_SYMBOLS = ("circle", "square", "triangle-up", "pentagon", "hexagon", "star")
# Heights in pixels: of the label of an effect, of each model below it, and of a chart's legend and axis.
_LABEL, _STEP, _GAP, _AROUND = 24, 15, 8, 120
_DIGITS = 6


@dataclass(frozen=True)
class Model:
    """A model as the charts of an experiment show it.

    Args:
        label: its short name.
        place: among the models of the section, which gives it its colour and its symbol.
        paper: the model of the paper beside which it is set.
    """

    label: str
    place: int
    paper: str | None


@dataclass(frozen=True)
class Mark:
    """One effect of one model.

    Args:
        place: among all effects of the experiment, by which its panel is found.
        model: number of the model in the experiment.
        effect: itself.
        paper: the paper's value.
    """

    place: int
    model: int
    effect: Effect
    paper: float | None

    @property
    def text(self) -> str:
        """Estimate and interval with their unit."""
        unit = "" if self.effect.unit == "fraction" else f" {self.effect.unit}"
        return interval(self.effect) + unit


@dataclass(frozen=True)
class Chart:
    """One view of an experiment.

    Args:
        view: the effects shown together.
        models: of the experiment.
        lines: for each effect of the view its marks.
        claims: for each effect of the view the claims on it.
    """

    view: View
    models: Sequence[Model]
    lines: Sequence[Sequence[Mark]]
    claims: Sequence[Sequence[Claim]]

    @property
    def height(self) -> int:
        """In pixels."""
        return self._line * len(self.lines) + _AROUND

    def figure(self) -> dict[str, Any]:
        """`data` and `layout` of a plotly figure."""
        # Plain values: plotly's classes check every one of them, which takes ten times as long as all else on the page.
        layout = {
            "height": self.height,
            "xaxis": {"range": list(self._range), "title": {"text": html.escape(self.view.unit)}},
            "yaxis": {"range": [-len(self.lines), 0]},
            "shapes": list(self._shapes()),
            "annotations": list(self._labels()),
        }
        return {"data": list(self._traces()), "layout": layout}

    @property
    def _line(self) -> int:
        return _LABEL + _STEP * len(self.models) + _GAP

    @property
    def _marks(self) -> list[Mark]:
        return [mark for line in self.lines for mark in line]

    @cached_property
    def _range(self) -> tuple[float, float]:
        """Ends of the axis: an interval far wider than what else is shown leaves the picture and flattens nothing."""
        effects = [mark.effect for mark in self._marks]
        ends = [end for claims in self.claims for claim in claims for region in regions_of(claim) for end in region]
        papers = [mark.paper for mark in self._marks]
        inner = [value for value in (*(effect.estimate for effect in effects), *papers, *ends) if value is not None]
        lowest, highest = min(inner), max(inner)
        span = highest - lowest or abs(highest) or 1.0
        low = min([lowest, *(max(e.low, lowest - span) for e in effects if math.isfinite(e.low))])
        high = max([highest, *(min(e.high, highest + span) for e in effects if math.isfinite(e.high))])
        pad = 0.06 * (high - low or span)
        return _short(low - pad), _short(high + pad)

    @property
    def _far(self) -> float:
        """Beyond the picture, wherever a reader drags it."""
        return 20 * (self._range[1] - self._range[0])

    def _height_of(self, line: int, model: int) -> float:
        return -line - (_LABEL + _STEP * (model + 0.5)) / self._line

    def _traces(self) -> Iterator[dict[str, Any]]:
        placed = [(line, mark) for line, marks in enumerate(self.lines) for mark in marks]
        for number, model in enumerate(self.models):
            own = [(line, mark) for line, mark in placed if mark.model == number]
            color, symbol = color_of(model.place), _SYMBOLS[model.place % len(_SYMBOLS)]
            effects = [mark.effect for _, mark in own]
            reach = [self._reach(effect) for effect in effects]
            yield {
                **self._points(own, [effect.estimate for effect in effects]),
                "name": html.escape(model.label),
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "color": color,
                    "thickness": 2,
                    "width": 0,
                    "array": [above for _, above in reach],
                    "arrayminus": [below for below, _ in reach],
                },
                "marker": {
                    "color": color,
                    "size": 10,
                    "line": {"width": 1},
                    "symbol": [f"{symbol}-open" if effect.is_range else symbol for effect in effects],
                },
            }
        given = [(line, mark) for line, mark in placed if mark.paper is not None]
        marker = {"symbol": "diamond-open", "size": 13, "line": {"width": 1.5}}
        values = [mark.paper or 0.0 for _, mark in given]
        yield {**self._points(given, values), "name": "the paper's value", "marker": marker}

    def _points(self, placed: Sequence[tuple[int, Mark]], values: Sequence[float]) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "markers",
            "hoverinfo": "text",
            "showlegend": bool(placed),
            "x": [_short(value) for value in values],
            "y": [_short(self._height_of(line, mark.model)) for line, mark in placed],
            "customdata": [mark.place for _, mark in placed],
        }

    def _reach(self, effect: Effect) -> tuple[float, float]:
        """From the estimate to either end of the interval."""
        low = effect.low if math.isfinite(effect.low) else effect.estimate - self._far
        high = effect.high if math.isfinite(effect.high) else effect.estimate + self._far
        return _short(effect.estimate - low), _short(high - effect.estimate)

    def _shapes(self) -> Iterator[dict[str, Any]]:
        """Where the claims on each effect hold, with dotted lines at the ends."""
        for line, claims in enumerate(self.claims):
            top, bottom = -line - _LABEL / self._line, -line - 1 + 0.5 * _GAP / self._line
            across = {"layer": "below", "y0": _short(top), "y1": _short(bottom)}
            for low, high in (region for claim in claims for region in regions_of(claim)):
                x0 = self._range[0] - self._far if low is None else low
                x1 = self._range[1] + self._far if high is None else high
                yield {"type": "rect", **across, "x0": _short(x0), "x1": _short(x1), "line": {"width": 0}}
                for end in (low, high):
                    if end is not None:
                        yield {"type": "line", **across, "x0": end, "x1": end, "line": {"width": 1.5, "dash": "dot"}}

    def _labels(self) -> Iterator[dict[str, Any]]:
        for line, (name, claims) in enumerate(zip(self.view.effects, self.claims, strict=True)):
            only = claims[0] if len(claims) == 1 else None
            text = name if only is None else f"{f'{HEADLINE} ' if only.headline else ''}{only.statement}"
            yield {"text": html.escape(text), "y": _short(-line - 0.5 * _LABEL / self._line)}


def themes() -> dict[str, Any]:
    """What all charts share, as plotly templates for `light` and `dark`."""
    return {name: _theme(palette) for name, palette in PALETTES.items()}


def _theme(palette: dict[str, str]) -> dict[str, Any]:
    ground, ink = palette["ground"], palette["ink"]
    layout = {
        "paper_bgcolor": ground,
        "plot_bgcolor": ground,
        "font": {"color": ink, "family": "system-ui, sans-serif"},
        "margin": {"l": 8, "r": 8, "t": 60, "b": 50},
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"size": 12}},
        "xaxis": {"gridcolor": palette["line"], "zerolinecolor": palette["muted"]},
        "yaxis": {"visible": False, "fixedrange": True},
        "shapedefaults": {"fillcolor": palette["region"], "line": {"color": palette["link"]}},
        "annotationdefaults": {
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "yanchor": "middle",
            "showarrow": False,
            "font": {"size": 12},
            "bgcolor": ground,
            "borderpad": 1,
        },
    }
    points = [{"marker": {"color": ink, "line": {"color": ink}}}]
    return {"layout": layout, "data": {"scatter": points}}


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
