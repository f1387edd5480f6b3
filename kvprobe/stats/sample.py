"""Rows of one model, and the effects that are read from them: every effect knows which rows it was made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from kvprobe.stats import intervals
from kvprobe.stats.effects import Effect
from kvprobe.stats.kappa import cohen_kappa
from kvprobe.stats.labels import Label
from kvprobe.stats.proportions import proportion
from kvprobe.stats.resampling import bootstrapped
from kvprobe.stats.rows import RowFilter
from kvprobe.stats.settings import StatisticsConfig

Column = str | pd.Series
NOISE = "noise.margin"
"""The effect that is the largest noise floor of a margin."""


@dataclass(frozen=True)
class Sample:
    """Rows that count, chosen by a filter that every effect made here carries.

    The names of effects are `condition.metric`. A parameter of the condition is written `{parameter}`; its value is
    one that the rows were chosen by (`for fraction, part in sample.by("fraction")`) or that `named` gives.

    Args:
        rows: one per measurement, with the cluster column.
        statistics: of the experiment.
        filter: by which the rows were chosen from the table of the run.
        parameters: for the names of effects, beside the columns that were chosen by one value.
        floor: noise floor of one margin, in logits.
        excluded: rows left out by a rule set before the run; every effect made here says so.
    """

    rows: pd.DataFrame
    statistics: StatisticsConfig
    filter: RowFilter = field(default_factory=RowFilter)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    floor: float = 0.0
    excluded: int = 0

    @classmethod
    def of_model(cls, rows: pd.DataFrame, statistics: StatisticsConfig) -> Sample:
        """All rows of a model that count; the floor is the largest `noise_floor` of any."""
        floor = float(rows["noise_floor"].max()) if "noise_floor" in rows else 0.0
        return cls(rows, statistics, floor=floor)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def clusters(self) -> pd.Series:
        """[row] label of the independent unit each row belongs to."""
        return self.rows[self.statistics.cluster]

    @property
    def shift(self) -> pd.Series:
        """[row] margin less that of the unedited base prompt, in logits."""
        return self.rows["margin"] - self.rows["m_base"]

    @property
    def gap(self) -> pd.Series:
        """[row] margin of the donor prompt less that of the base prompt, in logits."""
        return self.rows["m_donor"] - self.rows["m_base"]

    # Choosing rows.

    def of(self, **columns: Hashable | Sequence[Hashable]) -> Sample:
        """The rows with these values; a list, tuple or range allows several."""
        kept = {name: tuple(v) if isinstance(v, list | tuple | range) else (v,) for name, v in columns.items()}
        return self._narrowed(RowFilter().narrowed(kept))

    def measured(self, *columns: str) -> Sample:
        """The rows that hold a value in each of these columns."""
        return self._narrowed(RowFilter().narrowed({}, columns))

    def by(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """The values of the columns, and last the rows with them, in order of first appearance."""
        for values, rows in self.rows.groupby(list(columns), sort=False):
            chosen = dict(zip(columns, values, strict=True))
            yield *values, self._chosen(rows, RowFilter().narrowed({name: (value,) for name, value in chosen.items()}))

    def where(self, keep: pd.Series, *, exclude: bool = False) -> Sample:
        """The rows of a mask that a rule of the reading makes; the filter stays, since it is applied before the rule.

        Args:
            keep: [row] of booleans.
            exclude: whether the rows left out are told as excluded.
        """
        left_out = int((~keep).sum()) if exclude else 0
        return replace(self, rows=self.rows[keep], excluded=self.excluded + left_out)

    def excluding(self, count: int) -> Sample:
        """The same rows, with units (pairs, say) that a rule of the reading leaves out told as excluded."""
        return replace(self, excluded=self.excluded + count)

    def table(self, rows: pd.DataFrame) -> Sample:
        """The same rows worked into another table (one row per pair, say), which has the cluster column too."""
        return replace(self, rows=rows)

    def per(self, *columns: str, **aggregations: Any) -> Sample:
        """One row for each value of the columns: pandas' named aggregations, and the cluster of the first row."""
        groups = self.rows.groupby(list(columns), sort=False)
        cluster = {self.statistics.cluster: (self.statistics.cluster, "first")}
        named = {name: how if isinstance(how, tuple) else (name, how) for name, how in aggregations.items()}
        return self.table(groups.agg(**{**cluster, **named}))

    def named(self, **parameters: Any) -> Sample:
        """The same rows, with values for the parameters in names of effects."""
        return replace(self, parameters={**self.parameters, **parameters})

    def with_floor(self, floor: float) -> Sample:
        """The same rows with another noise floor of a margin, in logits."""
        return replace(self, floor=floor)

    def resampled(self, most: int) -> Sample:
        """The same rows, for a bootstrap of no more than `most` resamples."""
        fewer = min(most, self.statistics.resamples)
        return replace(self, statistics=self.statistics.model_copy(update={"resamples": fewer}))

    def label(self, name: str | Label) -> Label:
        """`condition.metric` as a label, with the parameters that the rows were chosen by."""
        chosen = {column: values[0] for column, values in self.filter.values.items() if len(values) == 1}
        return Label.of(name, {**chosen, **self.parameters})

    # Reading effects. A column is a name, or a [row] series worked out of the rows.

    def mean(self, name: str, column: Column, unit: str = "fraction", *, noise_floor: float = 0.0) -> Effect:
        """Mean of a column; see `kvprobe.stats.mean`."""
        return self._read(intervals.mean, name, self._column(column), unit=unit, noise_floor=noise_floor)

    def rate(self, name: str, column: Column) -> Effect:
        """Share of rows in which a column of yes and no is true; see `kvprobe.stats.proportion`."""
        return self._read(proportion, name, self._column(column).astype(float))

    def median(self, name: str, column: Column, unit: str = "fraction", *, noise_floor: float = 0.0) -> Effect:
        """Median over clusters; see `kvprobe.stats.median`."""
        return self._read(intervals.median, name, self._column(column), unit=unit, noise_floor=noise_floor)

    def maximum(self, name: str, column: Column, unit: str = "logits") -> Effect:
        """The largest value, for identities; see `kvprobe.stats.maximum`."""
        return self._read(intervals.maximum, name, self._column(column), unit=unit)

    def ratio(
        self, name: str, top: Column, bottom: Column, unit: str = "fraction", *, noise_floor: float = 0.0
    ) -> Effect:
        """Ratio of two columns' sums; see `kvprobe.stats.ratio_of_sums`."""
        columns = self._column(top), self._column(bottom)
        return self._read(intervals.ratio_of_sums, name, *columns, unit=unit, noise_floor=noise_floor)

    def recovery(self, name: str, shift: Column | None = None) -> Effect:
        """Shift of the margin as a share of the gap between base and donor, ratio of sums.

        Args:
            name: of the effect, `.recovery` included.
            shift: [row] in logits, where it is not the margin less that of the base.
        """
        return self.ratio(name, self.shift if shift is None else shift, self.gap, noise_floor=self.floor)

    def difference(
        self,
        name: str,
        column: Column,
        by: str | Sequence[str],
        first: Any,
        second: Any,
        *,
        within: str | Sequence[str] = "pair",
        unit: str = "fraction",
        noise_floor: float | None = 0.0,
    ) -> Iterator[Effect]:
        """Mean of a column under the first condition less that under the second, on what both have in common.

        Args:
            name: of the effect.
            column: what is compared; several rows of one condition in one unit enter with their mean.
            by: the column, or columns, that tell the conditions apart.
            first: value of `by`, a tuple for several columns.
            second: value of `by`.
            within: the column, or columns, that both share: the pair.
            unit: of the column.
            noise_floor: of the difference; `None` for one step of a share, 1 / n.

        Yields:
            The effect, or nothing where one of the two was not measured.
        """
        units, columns = ([key] if isinstance(key, str) else list(key) for key in (within, by))
        values = self.rows.assign(value=self._column(column).astype(float))
        wide = values.pivot_table(index=units, columns=columns, values="value", observed=True)
        if first not in wide or second not in wide:
            return
        change = (wide[first] - wide[second]).dropna()
        if change.empty:
            return
        arms = zip(*((arm if isinstance(arm, tuple) else (arm,)) for arm in (first, second)), strict=True)
        chosen = dict(zip(columns, (tuple(dict.fromkeys(arm)) for arm in arms), strict=True))
        cluster = self.rows.groupby(units)[self.statistics.cluster].first().loc[change.index]
        both = self.of(**chosen).table(pd.DataFrame({"change": change, self.statistics.cluster: cluster}))
        floor = 1 / len(change) if noise_floor is None else noise_floor
        yield both.mean(name, "change", unit, noise_floor=floor)

    def bootstrap(
        self,
        name: str,
        statistic: Callable[[Any], float],
        unit: str = "fraction",
        *,
        sums_of: Sequence[str] = (),
        noise_floor: float = 0.0,
    ) -> Effect:
        """Any smooth statistic of the rows, or of the sums of the columns `sums_of`, resampled by cluster.

        See `kvprobe.stats.bootstrapped`.
        """
        rows = self.rows[list(sums_of)] if sums_of else self.rows
        settings = {"unit": unit, "noise_floor": noise_floor, "of_sums": bool(sums_of)}
        return self._read(bootstrapped, name, rows, statistic, **settings)

    def kappa(self, name: str, first: Column, second: Column) -> Effect:
        """Cohen's kappa of two columns of answers; see `kvprobe.stats.kappa.cohen_kappa`."""
        return self._read(cohen_kappa, name, self._column(first), self._column(second))

    def noise(self) -> Effect:
        """`noise.margin`: the largest noise floor of any pair, in logits; `n` are pairs, however many rows each has."""
        return self.per("pair", noise_floor="first").maximum(NOISE, "noise_floor")

    def made(self, effect: Effect) -> Effect:
        """An effect from an estimator of the caller's own, with these rows as its provenance."""
        return replace(effect, rows=self.filter, excluded=effect.excluded + self.excluded)

    def _read(self, estimator: Callable[..., Effect], name: str, *values: Any, **settings: Any) -> Effect:
        settings = {key: value for key, value in settings.items() if value}
        if estimator is not intervals.maximum:
            settings["statistics"] = self.statistics
        return self.made(estimator(self.label(name), *values, clusters=self.clusters, **settings))

    def _column(self, column: Column) -> pd.Series:
        return self.rows[column] if isinstance(column, str) else column

    def _narrowed(self, more: RowFilter) -> Sample:
        return self._chosen(more.select(self.rows), more)

    def _chosen(self, rows: pd.DataFrame, more: RowFilter) -> Sample:
        return replace(self, rows=rows, filter=self.filter.narrowed(more.values, more.measured))
