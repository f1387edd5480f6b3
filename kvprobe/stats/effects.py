"""The effect: a number that never travels without its interval, n, exclusions and noise floor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvprobe.viewing import Viewable

_NUMBERS = ("estimate", "low", "high", "noise_floor")
RANGE = "range"


@dataclass(frozen=True)
class Effect(Viewable):
    """One summarised quantity of one subject.

    Args:
        name: dotted, as claims name it: `field_only.recovery`.
        estimate: in `unit`.
        low: lower end of the interval (or range), in `unit`; may be `-inf` when the data do not bound it.
        high: upper end; may be `inf`.
        n: rows that entered.
        clusters: independent clusters among them.
        excluded: rows left out by a rule set before the run.
        noise_floor: size, in `unit`, of a change that means nothing; no interval is narrower on either side.
        unit: such as `fraction` or `logits`.
        method: how the interval was made: `cluster t`, `wilson`, `order statistics`, `cluster bootstrap` or
            `range` (too few clusters for an interval: the smallest and largest cluster value).
        seed: of the bootstrap, `None` where nothing was drawn.
        confidence: nominal coverage.
        extra: side figures, such as `median`, `mean_of_ratios`, `ratio_of_sums`, `standard_error`.
    """

    name: str
    estimate: float
    low: float
    high: float
    n: int
    clusters: int
    excluded: int = 0
    noise_floor: float = 0.0
    unit: str = "fraction"
    method: str = "cluster t"
    seed: int | None = None
    confidence: float = 0.95
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if math.isnan(self.estimate) or math.isnan(self.low) or math.isnan(self.high):
            raise ValueError(f"effect {self.name!r} is not a number")
        if not self.low <= self.estimate <= self.high:
            raise ValueError(f"effect {self.name!r}: {self.estimate} lies outside [{self.low}, {self.high}]")

    @property
    def is_range(self) -> bool:
        """Whether low and high are a range of cluster values, not an interval."""
        return self.method == RANGE

    def __str__(self) -> str:
        """`0.034 [-0.012, 0.081], n = 120, 30 clusters`, with the exclusions if there were any."""
        ends = f"{_short(self.low)}, {_short(self.high)}"
        bounds = f"range {ends}" if self.is_range else f"[{ends}]"
        unit = "" if self.unit == "fraction" else f" {self.unit}"
        left_out = f", {self.excluded} excluded" if self.excluded else ""
        return f"{_short(self.estimate)}{unit} {bounds}, n = {self.n}, {self.clusters} clusters{left_out}"

    def to_record(self) -> dict[str, Any]:
        """Plain values for strict JSON; unbounded ends become the strings `inf` and `-inf`."""
        record = asdict(self)
        for key in _NUMBERS:
            record[key] = _to_json(record[key])
        record["extra"] = {key: _to_json(value) for key, value in self.extra.items()}
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Effect:
        """The effect that `to_record` wrote."""
        values = dict(record)
        for key in _NUMBERS:
            values[key] = float(values[key])
        values["extra"] = {key: float(value) for key, value in values.get("extra", {}).items()}
        return cls(**values)


def _short(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else str(value)


def _to_json(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))
