"""Pieces of `kvprobe.figures.rates` for figures that are no specs yet; goes with the last of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvprobe.figures.panel import Panel
from kvprobe.figures.rates import RatesByModel, Series, count_of, draw_rates, rate_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Series", "count_of", "draw_rates", "name_arms", "rate_key", "rates_by_model"]


def name_arms(axes: Axes, labels: Mapping[str, str]) -> None:
    """Label the lines; columns share their axis, so naming them once names them for all."""
    axes.set_yticks(range(len(labels)), list(labels.values()))


def rates_by_model(axes: Axes, panels: Sequence[Panel], labels: Mapping[str, str], title: str, side: str) -> None:
    """Shares side by side, models beside each other in their colours, for the section's figure."""
    RatesByModel(labels, title, side).draw(axes, panels)
