"""An audit as HTML: a view for notebooks, and the same as a page of its own, without network or script."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvprobe.auditing.result import AuditResult, FieldAudit
from kvprobe.auditing.verdict import resolution
from kvprobe.html.templating import render
from kvprobe.html.tokens import Token, valued_block

_LISTED = 10
_VISIBLE = 0.01
"""Share of the largest recovery from which on a token is coloured."""


def audit_page(result: AuditResult) -> str:
    """A whole HTML page."""
    return render("audit_page", **_values(result))


def audit_html(result: AuditResult) -> str:
    """The page's body, with its style."""
    return render("audit", **_values(result))


def _values(result: AuditResult) -> dict[str, Any]:
    return {"result": result, "fields": [_field(field) for field in result.fields]}


def _field(field: FieldAudit) -> dict[str, Any]:
    judged = [token for token in field.tokens if token.recovery is not None]
    limit = max((abs(token.recovery or 0.0) for token in judged), default=0.0) or 1.0
    strongest = sorted(judged, key=lambda token: -abs(token.recovery or 0.0))[:_LISTED]
    floor = resolution(field)
    tokens = [
        Token(
            token.text,
            token.position,
            shown="" if token.text else "…",
            segment=token.segment,
            marked=field.span[0] <= token.position < field.span[1],
        )
        for token in field.tokens
    ]
    recoveries = np.array([np.nan if token.recovery is None else token.recovery for token in field.tokens])
    return {
        "audit": field,
        "limit": limit,
        "floor": floor,
        "prompt": valued_block(
            tokens, recoveries, limit, "recovery", floor=max(floor, _VISIBLE * limit), most=len(tokens)
        ),
        "strongest": [token for token in strongest if abs(token.recovery or 0.0) > max(floor, 0.005)],
        "widths": {part.name: round(100 * min(1.0, max(0.0, part.recovery)), 1) for part in field.segments},
    }
