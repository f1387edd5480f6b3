"""What commands write: text as it is, never markup, with the control characters of prompts and names made visible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.segment import Segment

from kvprobe.viewing import visible


class Terminal(Console):
    """A console that takes no text for markup and lets no control character of it through."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **settings})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of whatever is printed; all that rich draws comes through here."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


def progress_bar() -> Progress:
    """A bar on stderr that is gone when it is done, and is not there where that is no terminal."""
    console = Terminal(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def say(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print a line."""
    typer.echo(visible(str(text)), err=err, nl=nl)
