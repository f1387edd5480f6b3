"""The colours and signs of every page and view."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from kvprobe.figures.style import COLORS
from kvprobe.report.tables import STYLES
from kvprobe.runs.claims import Outcome


@dataclass(frozen=True)
class OutcomeStyle:
    """How a kind of verdict is shown.

    Args:
        name: the kind.
        color: of its border in a view.
        meaning: in one or two sentences.
    """

    name: Outcome
    color: str
    meaning: str

    @property
    def kind(self) -> str:
        """Its CSS class, and the first part of its colours in `PALETTES`."""
        return str(self.name).replace(" ", "-")

    @property
    def mark(self) -> str:
        """One character."""
        return STYLES[self.name][0]


OUTCOMES = {
    style.name: style
    for style in (
        OutcomeStyle(Outcome.HOLDS, COLORS["green"], "The whole interval satisfies the claim."),
        OutcomeStyle(Outcome.FAILS, COLORS["vermilion"], "No part of the interval satisfies the claim."),
        OutcomeStyle(
            Outcome.OPEN,
            COLORS["orange"],
            "Part of the interval satisfies the claim and part does not: no evidence for or against it.",
        ),
        OutcomeStyle(
            Outcome.UNDERPOWERED,
            COLORS["orange"],
            "No sample of this size could make the claim hold, whatever it showed; the reason says how many it needs.",
        ),
        OutcomeStyle(
            Outcome.NOT_APPLICABLE,
            COLORS["grey"],
            "The model cannot do the task (it fails the inclusion gate) or could not be measured. No evidence about "
            "the claim.",
        ),
    )
}
PALETTES = {
    "light": {
        "ground": "#ffffff",
        "raised": "#f3f5f7",
        "ink": "#1d2126",
        "muted": "#545c66",
        "line": "#c9d0d8",
        "link": "#0a5a94",
        "focus": "#0a5a94",
        "region": "rgba(0, 114, 178, 0.13)",
        "problem-ink": "#7a2e00",
        "problem-tint": "#fdeee2",
        "holds-ink": "#00573f",
        "holds-tint": "#dcf3ea",
        "fails-ink": "#8a2c00",
        "fails-tint": "#fde5d6",
        "open-ink": "#5f4a00",
        "open-tint": "#faefc4",
        "needs-more-pairs-ink": "#4d3f6b",
        "needs-more-pairs-tint": "#ebe4f7",
        "not-applicable-ink": "#434b55",
        "not-applicable-tint": "#e4e8ed",
    },
    "dark": {
        "ground": "#14171b",
        "raised": "#1f242a",
        "ink": "#e8ebee",
        "muted": "#a9b2bc",
        "line": "#434b55",
        "link": "#83c4f2",
        "focus": "#83c4f2",
        "region": "rgba(86, 180, 233, 0.2)",
        "problem-ink": "#ffc9a3",
        "problem-tint": "#4a2308",
        "holds-ink": "#8fe0c2",
        "holds-tint": "#0c3a2c",
        "fails-ink": "#ffbb94",
        "fails-tint": "#4f2109",
        "open-ink": "#f2d675",
        "open-tint": "#413404",
        "needs-more-pairs-ink": "#d3c3f2",
        "needs-more-pairs-tint": "#362a4d",
        "not-applicable-ink": "#c5ced8",
        "not-applicable-tint": "#343c46",
    },
}
"""The pages' colours by what they are for; text stands out from its ground by 4.5 to 1 or more (WCAG 2.2)."""
STRONGEST = 0.6
"""Opacity of a token of the largest value: black and white text can both be read on it."""


def palette_css() -> Markup:
    """The palettes as CSS variables `--ground`, `--ink`, ..., dark where the reader's system is."""
    light, dark = (" ".join(f"--{name}: {color};" for name, color in each.items()) for each in PALETTES.values())
    return Markup(
        f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )


def tint(color: str, opacity: float) -> str:
    """A colour `#rrggbb` as `rgba(...)` that lets a light or a dark page shine through."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def signed_tint(value: float, limit: float) -> str:
    """Vermilion above 0 and blue below, at `STRONGEST` opacity when `abs(value)` reaches `limit`."""
    color = COLORS["vermilion"] if value > 0 else COLORS["blue"]
    return tint(color, round(STRONGEST * min(1.0, abs(value) / limit), 3))
