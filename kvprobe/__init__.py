"""Mechanistic interpretability of KV caches: probe, edit and compose what a model wrote at prefill."""

from kvprobe.viewing import Viewable

__version__ = "0.1.0"


def _draw(value: object) -> str:
    from kvprobe.html.views import html_of

    return html_of(value)


# The only place that knows both the objects and what draws them; `kvprobe.html` is imported at the first view.
Viewable.drawn_by = _draw
