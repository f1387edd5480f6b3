"""The templates that notebook output is made from; they escape whatever is put into them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kvprobe.report.figures import COLORS
from kvprobe.report.tables import number, short

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Html:
    """A piece of HTML that a notebook shows, with what stands for it as text."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def render(template: str, **values: Any) -> str:
    """The HTML of a template in `kvprobe/display/templates`."""
    return _environment().get_template(f"{template}.html.jinja").render(values)


def tint(color: str, opacity: float) -> str:
    """A colour `#rrggbb` that lets a light or a dark page shine through."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def size_of(count: float) -> str:
    """Bytes in the largest unit that leaves a number above 1: `1.4 MB`."""
    return f"{scaled(count, ('', 'k', 'M', 'G', 'T'))}B"


def scaled(count: float, prefixes: tuple[str, ...] = ("", "k", "M", "G", "T", "P")) -> str:
    """A count with a metric prefix: `3.2 G`."""
    step = 0
    while abs(count) >= 1000 and step < len(prefixes) - 1:
        count, step = count / 1000, step + 1
    digits = f"{count:.0f}" if step == 0 else f"{count:.3g}"
    return f"{digits} {prefixes[step]}"


@cache
def _environment() -> Environment:
    from kvprobe.display.templating import environment

    made = environment("kvprobe.display")
    made.globals.update(COLORS=COLORS)
    made.filters.update(tint=tint, number=number, short=short)
    return made
