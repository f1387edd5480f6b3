"""Mechanistic interpretability of KV caches: probe, edit and compose what a model wrote at prefill.

The names in `__init__.pyi` are imported when they are first used, so `import kvprobe` is instant and loads no torch. A
function there must not be called like a package beside this file: importing the package would put it in its place.
"""

from __future__ import annotations

import lazy_loader

from kvprobe.viewing import Viewable

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _draw(value: object) -> str:
    from kvprobe.html.views import html_of

    return html_of(value)


# The only place that knows both the objects and what draws them; `kvprobe.html` is imported at the first view.
Viewable.drawn_by = _draw
