"""Which rows an effect was made of, as a filter that anybody can apply again."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RowFilter:
    """The rows whose columns hold one of the given values; without conditions, all rows.

    Args:
        values: by column, the values that are kept.
        measured: columns that must hold a value, whichever it is.
    """

    values: Mapping[str, tuple[Hashable, ...]] = field(default_factory=dict)
    measured: tuple[str, ...] = ()

    def narrowed(self, values: Mapping[str, Iterable[Hashable]], measured: Iterable[str] = ()) -> RowFilter:
        """This filter with more conditions; of a column that has one already, the later one counts."""
        plain = {column: tuple(_plain(value) for value in kept) for column, kept in values.items()}
        return replace(
            self, values={**self.values, **plain}, measured=tuple(dict.fromkeys([*self.measured, *measured]))
        )

    def select(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows that pass, with the index they have.

        Raises:
            KeyError: a column is not there.
        """
        import pandas as pd

        keep = pd.Series(data=True, index=rows.index)
        for column, values in self.values.items():
            keep &= rows[column].isin(values)
        for column in self.measured:
            keep &= rows[column].notna()
        return rows[keep]

    def describe(self) -> str:
        """`intervention is field_only, layer is one of 3, 4`; `all rows` without conditions."""
        told = [
            f"{column} is {values[0]}" if len(values) == 1 else f"{column} is one of {', '.join(map(str, values))}"
            for column, values in self.values.items()
        ]
        return ", ".join([*told, *(f"{column} was measured" for column in self.measured)]) or "all rows"

    def to_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        record: dict[str, Any] = {column: list(values) for column, values in self.values.items()}
        return {"values": record, **({"measured": list(self.measured)} if self.measured else {})}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RowFilter:
        """The filter that `to_record` wrote."""
        values = {column: tuple(kept) for column, kept in record["values"].items()}
        return cls(values, tuple(record.get("measured", ())))


def _plain(value: Any) -> Any:
    """Numpy's scalars as Python's."""
    return value.item() if hasattr(value, "item") else value
