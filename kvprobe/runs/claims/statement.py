"""Statements: what a claim says of one effect, as a region of its values; nothing is evaluated."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvprobe.stats import Effect

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_QUANTITY = r"(?P<abs>abs\(\s*)?(?P<effect>[A-Za-z_]\w*(?:\.\w+)*)(?(abs)\s*\))"
_ONE_SIDED = re.compile(rf"{_QUANTITY}\s*(?P<comparator><=|>=|==|<|>)\s*(?P<number>{_NUMBER})")
_BETWEEN = re.compile(rf"(?P<lower>{_NUMBER})\s*(?P<left><=|<)\s*{_QUANTITY}\s*(?P<right><=|<)\s*(?P<upper>{_NUMBER})")


@dataclass(frozen=True)
class Statement:
    """A claim as a region of an effect's values.

    Args:
        effect: dotted name of the effect.
        absolute: whether it is about the absolute value.
        lower: lower end of the region, `-inf` for none.
        upper: upper end, `inf` for none.
        includes_lower: whether the lower end itself belongs to it.
        includes_upper: whether the upper end itself belongs to it.
    """

    effect: str
    absolute: bool
    lower: float
    upper: float
    includes_lower: bool = False
    includes_upper: bool = False

    def contains(self, low: float, high: float) -> bool:
        """Whether all of [low, high] lies in the region."""
        return self._above_lower(low) and self._below_upper(high)

    def misses(self, low: float, high: float) -> bool:
        """Whether none of [low, high] lies in the region."""
        return not self._above_lower(high) or not self._below_upper(low)

    def satisfied_by(self, value: float) -> bool:
        """Whether a value of the effect satisfies it."""
        point = abs(value) if self.absolute else value
        return self.contains(point, point)

    def bounds_of(self, effect: Effect) -> tuple[float, float]:
        """The interval of the quantity the statement is about."""
        if not self.absolute:
            return effect.low, effect.high
        smaller, larger = sorted((abs(effect.low), abs(effect.high)))
        return (0.0, larger) if effect.low <= 0 <= effect.high else (smaller, larger)

    def _above_lower(self, value: float) -> bool:
        return value > self.lower or (value == self.lower and self.includes_lower)

    def _below_upper(self, value: float) -> bool:
        return value < self.upper or (value == self.upper and self.includes_upper)


def parse_statement(text: str) -> Statement:
    """Read `field_only.recovery < 0.15`, `abs(x.y) <= 0.1`, `x == 0` or `0.85 <= x <= 1.15`; nothing is evaluated.

    Raises:
        ValueError: the text has another form.
    """
    between = _BETWEEN.fullmatch(text.strip())
    if between:
        lower, upper = float(between["lower"]), float(between["upper"])
        if lower > upper:
            raise ValueError(f"no value lies between {lower:g} and {upper:g}")
        ends = between["left"] == "<=", between["right"] == "<="
        return Statement(between["effect"], bool(between["abs"]), lower, upper, *ends)
    match = _ONE_SIDED.fullmatch(text.strip())
    if not match:
        raise ValueError(
            f"cannot read the statement {text!r}; write it as 'effect.name < 0.15', "
            "'abs(effect.name) < 0.1' or '0.8 <= effect.name <= 1.2'"
        )
    number, comparator = float(match["number"]), match["comparator"]
    lower = -math.inf if comparator.startswith("<") else number
    upper = math.inf if comparator.startswith(">") else number
    closed = comparator.endswith("=")
    return Statement(match["effect"], bool(match["abs"]), lower, upper, closed, closed)
