"""The audit as a page: one file without network or script, in light and dark; its body is what a notebook shows."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from kvprobe.auditing.result import AuditResult, FieldAudit, Safety, TokenReading, brief
from kvprobe.auditing.verdict import fixed, resolution
from kvprobe.display.page import tint
from kvprobe.report.figures import COLORS
from kvprobe.report.tables import short

if TYPE_CHECKING:
    from jinja2 import Environment

_FULL = 0.6
"""Opacity of the strongest token: text stays readable on it, black or white."""
_LISTED = 10
SIGNS = {Safety.SAFE: "✓", Safety.FRAGILE: "~", Safety.UNSAFE: "✗", Safety.IMPOSSIBLE: "–"}


def page(result: AuditResult) -> str:
    """A whole HTML page."""
    return _environment().get_template("page.html.jinja").render(_values(result))


def fragment(result: AuditResult) -> str:
    """The page's body, with its style."""
    return _environment().get_template("body.html.jinja").render(_values(result))


def _values(result: AuditResult) -> dict[str, Any]:
    return {"result": result, "fields": [_field(field) for field in result.fields]}


def _field(field: FieldAudit) -> dict[str, Any]:
    judged = [token for token in field.tokens if token.recovery is not None]
    limit = max((abs(token.recovery or 0.0) for token in judged), default=0.0) or 1.0
    strongest = sorted(judged, key=lambda token: -abs(token.recovery or 0.0))[:_LISTED]
    floor = resolution(field)
    return {
        "audit": field,
        "limit": limit,
        "floor": floor,
        "tokens": [_token(token, field, limit, floor) for token in field.tokens],
        "strongest": [token for token in strongest if abs(token.recovery or 0.0) > max(floor, 0.005)],
        "widths": {part.name: round(100 * min(1.0, max(0.0, part.recovery)), 1) for part in field.segments},
    }


def _token(token: TokenReading, field: FieldAudit, limit: float, floor: float) -> dict[str, Any]:
    marked = field.span[0] <= token.position < field.span[1]
    told, style = "", ""
    if token.recovery is not None:
        told = f", recovery {token.recovery:.3f}"
        strength = abs(token.recovery) / limit
        if abs(token.recovery) > floor and strength >= 0.01:
            color = COLORS["vermilion"] if token.recovery > 0 else COLORS["blue"]
            style = f"background:{tint(color, round(_FULL * strength, 3))}"
    return {
        # A line break is shown and then made; other blanks stay as they are.
        "runs": re.findall(r"\n|[^\n]+", token.text) or [""],
        "title": f"position {token.position}, {token.segment}{told}",
        "style": style,
        "marked": marked,
    }


@cache
def _environment() -> Environment:
    from kvprobe.display.templating import environment

    made = environment("kvprobe.auditing")
    made.filters.update(short=short, tint=tint, brief=brief, percent=lambda share: f"{share:.0%}", fixed=fixed)
    made.globals.update(COLORS=COLORS, SIGNS=SIGNS, full=_FULL)
    return made
