"""How objects of every layer show themselves in a notebook, without knowing what draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar


class Viewable:
    """Base of the objects that `kvprobe.html` draws; where nothing draws them a notebook shows their `repr`.

    `drawn_by` is set once, on this class, when kvprobe is imported.
    """

    drawn_by: ClassVar[Callable[[object], str] | None] = None

    def _repr_html_(self) -> str | None:
        return Viewable.drawn_by(self) if Viewable.drawn_by is not None else None
