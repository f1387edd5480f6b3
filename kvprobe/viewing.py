"""How objects of every layer show themselves in a notebook, without knowing what draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

_SEEN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SEEN[0x7F] = 0x2421
# C1 controls, lone surrogates, and what turns the direction of a text.
for _first, _last in ((0x80, 0x9F), (0xD800, 0xDFFF), (0x202A, 0x202E), (0x2066, 0x2069)):
    _SEEN |= dict.fromkeys(range(_first, _last + 1), 0xFFFD)


def visible(text: str) -> str:
    """`text` with a picture for every control character but line ends and tabs, so that none reaches a terminal."""
    return text.translate(_SEEN)


class Viewable:
    """Base of the objects that `kvprobe.html` draws; where nothing draws them a notebook shows their `repr`.

    `drawn_by` is set once, on this class, when kvprobe is imported.
    """

    drawn_by: ClassVar[Callable[[object], str] | None] = None

    def _repr_html_(self) -> str | None:
        return Viewable.drawn_by(self) if Viewable.drawn_by is not None else None
