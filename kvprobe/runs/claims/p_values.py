"""The p value that goes with a verdict, or why there is none."""

from __future__ import annotations

import math

from scipy import stats

from kvprobe.runs.claims.claim import ClaimKind
from kvprobe.runs.claims.statement import Statement
from kvprobe.stats import Effect
from kvprobe.stats.proportions import EXACT_SHARE, WILSON


def p_value(kind: ClaimKind | None, statement: Statement, effect: Effect) -> tuple[float | None, str]:
    """The p value of the boundary nearest to the estimate, since a verdict may fall to either side of it, or why none.

    Two-sided; of a perfect score one-sided, as its interval is.
    """
    if why := _untested(kind, effect):
        return None, why
    value = abs(effect.estimate) if statement.absolute else effect.estimate
    boundary = min(
        (end for end in (statement.lower, statement.upper) if math.isfinite(end)), key=lambda end: abs(value - end)
    )
    if effect.method in (WILSON, EXACT_SHARE):
        return _of_a_share(effect, *_as_share(effect, value, boundary))
    error, freedom = effect.extra.get("standard_error"), effect.extra.get("degrees_of_freedom")
    if error is None or freedom is None:
        return None, f"the method is {effect.method!r}, which gives an interval alone"
    if not error:
        return None, "all clusters are alike"
    return min(1.0, 2 * float(stats.t.sf(abs(value - boundary) / error, freedom))), ""


def _untested(kind: ClaimKind | None, effect: Effect) -> str:
    if kind is ClaimKind.IDENTITY:
        return "an identity"
    if effect.unit == "p":
        return "it is itself the p value of a test"
    if effect.is_range:
        return f"a range of {effect.clusters} clusters"
    if effect.method == "exact":
        return "it describes these rows and infers nothing"
    if not (math.isfinite(effect.low) and math.isfinite(effect.high)):
        return "the data do not bound it"
    return ""


def _as_share(effect: Effect, value: float, boundary: float) -> tuple[float, float]:
    """Kappa's interval is that of the agreement, with the agreement by chance held at its estimate."""
    if effect.unit != "kappa":
        return value, boundary
    chance = effect.extra["chance_agreement"]
    return effect.extra["observed_agreement"], chance + boundary * (1 - chance)


def _of_a_share(effect: Effect, share: float, boundary: float) -> tuple[float | None, str]:
    if not 0 < boundary < 1:
        return None, "no share lies beyond 0 or 1"
    size = effect.extra["effective_n"]
    if effect.method == EXACT_SHARE:
        return (boundary if share else 1 - boundary) ** size, ""
    # Of the score test that Wilson's interval inverts.
    error = math.sqrt(boundary * (1 - boundary) / size)
    return min(1.0, 2 * float(stats.norm.sf(abs(share - boundary) / error))), ""
