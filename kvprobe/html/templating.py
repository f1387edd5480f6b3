"""The templates of all pages and views; they escape whatever is put into them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvprobe.auditing.result import brief
from kvprobe.auditing.verdict import TOLERANCE, fixed
from kvprobe.figures.style import COLORS
from kvprobe.html.style import OUTCOMES, PALETTES, STRONGEST, palette_css, tint
from kvprobe.report.tables import number, short
from kvprobe.viewing import visible


@dataclass(frozen=True)
class Html:
    """A piece of HTML that a notebook shows, and the text that stands for it elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def render(template: str, **values: Any) -> str:
    """The HTML of a template in `kvprobe/html/templates`, without its suffix `.html.jinja`."""
    return _environment().get_template(f"{template}.html.jinja").render(values)


def asset(name: str) -> Markup:
    """A file of `kvprobe/html/assets`, to stand in a page as it is."""
    return Markup((files("kvprobe.html") / "assets" / name).read_text(encoding="utf-8"))


def title_of(section: str) -> str:
    """`Section 3` of `section3`."""
    return section.replace("section", "section ").capitalize()


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("kvprobe.html"),
        autoescape=True,
        undefined=StrictUndefined,
        # Every text that is put into a template comes through here.
        finalize=lambda value: visible(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(
        TOLERANCE=TOLERANCE,
        COLORS=COLORS,
        OUTCOMES=OUTCOMES,
        PALETTES=PALETTES,
        STRONGEST=STRONGEST,
        palette_css=palette_css,
    )
    made.filters.update(
        brief=brief,
        fixed=fixed,
        number=number,
        percent=lambda share: f"{share:.0%}",
        short=short,
        tint=tint,
        title_of=title_of,
    )
    return made
