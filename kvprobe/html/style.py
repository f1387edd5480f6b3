"""The colours and signs of every page and view."""

from __future__ import annotations

from kvprobe.figures.style import COLORS
from kvprobe.runs.claims import Outcome

OUTCOME_COLORS = {
    Outcome.REPRODUCED: COLORS["green"],
    Outcome.CONTRADICTED: COLORS["vermilion"],
    Outcome.INCONCLUSIVE: COLORS["orange"],
    Outcome.NOT_APPLICABLE: COLORS["grey"],
}
STRONGEST = 0.6
"""Opacity of a token of the largest value: black and white text can both be read on it."""


def tint(color: str, opacity: float) -> str:
    """A colour `#rrggbb` as `rgba(...)` that lets a light or a dark page shine through."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def signed_tint(value: float, limit: float) -> str:
    """Vermilion above 0 and blue below, at `STRONGEST` opacity when `abs(value)` reaches `limit`."""
    color = COLORS["vermilion"] if value > 0 else COLORS["blue"]
    return tint(color, round(STRONGEST * min(1.0, abs(value) / limit), 3))
