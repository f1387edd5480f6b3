"""The effect: a number that never travels without its interval, n, exclusions and noise floor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvprobe.stats.labels import Label, Scalar
from kvprobe.stats.rows import RowFilter
from kvprobe.viewing import Viewable

_NUMBERS = ("estimate", "low", "high", "noise_floor")
RANGE = "range"


@dataclass(frozen=True)
class Effect(Viewable):
    """One summarised quantity of one subject.

    Args:
        label: condition, parameters and metric; claims use its printed form, `field_only.recovery`.
        estimate: in `unit`.
        low: lower end of the interval (or range), in `unit`; may be `-inf` when the data do not bound it.
        high: upper end; may be `inf`.
        n: rows that entered.
        clusters: independent clusters among them.
        excluded: rows left out by a rule set before the run.
        noise_floor: size, in `unit`, of a change that means nothing; no interval is narrower on either side.
        unit: such as `fraction` or `logits`.
        method: how the interval was made: `cluster t`, `wilson`, `exact binomial`, `order statistics`, `cluster
            bootstrap`, `exact` (it describes these rows alone) or `range` (too few clusters for an interval: the
            smallest and largest cluster value).
        seed: of the bootstrap, `None` where nothing was drawn.
        confidence: nominal coverage.
        extra: side figures, such as `median`, `mean_of_ratios`, `ratio_of_sums`, `standard_error`.
        rows: which of the rows that count it was made of; `None` where it was made of no table.
    """

    label: Label
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
    rows: RowFilter | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.estimate) or math.isnan(self.low) or math.isnan(self.high):
            raise ValueError(f"effect {self.name!r} is not a number")
        if not self.low <= self.estimate <= self.high:
            raise ValueError(f"effect {self.name!r}: {self.estimate} lies outside [{self.low}, {self.high}]")

    @property
    def name(self) -> str:
        """The printed label: `suffix_10.recovery`."""
        return str(self.label)

    @property
    def condition(self) -> str:
        """What was done, with its parameters by name: `suffix_{percent}`."""
        return self.label.condition

    @property
    def metric(self) -> str:
        """What was read: `recovery`."""
        return self.label.metric

    @property
    def parameters(self) -> Mapping[str, Scalar]:
        """The values of the condition's parameters: `{"percent": 10}`."""
        return self.label.parameters

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
        record = {
            key: getattr(self, key) for key in ("n", "clusters", "excluded", "unit", "method", "seed", "confidence")
        }
        record |= {"name": self.name, "condition": self.condition, "metric": self.metric}
        record |= {key: _to_json(getattr(self, key)) for key in _NUMBERS}
        record["parameters"] = dict(self.parameters)
        record["extra"] = {key: _to_json(value) for key, value in self.extra.items()}
        record["rows"] = self.rows.to_record() if self.rows else None
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Effect:
        """The effect that `to_record` wrote; a record without parts is told by its name alone."""
        parts = ("name", "condition", "metric", "parameters")
        values = {key: value for key, value in record.items() if key not in parts}
        for key in _NUMBERS:
            values[key] = float(values[key])
        values["extra"] = {key: float(value) for key, value in values.get("extra", {}).items()}
        values["rows"] = RowFilter.from_record(values["rows"]) if values.get("rows") else None
        if "metric" in record:
            label = Label(record["condition"], record["metric"], record["parameters"])
        else:
            label = Label.of(record["name"])
        return cls(label=label, **values)


def _short(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else str(value)


def _to_json(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))
