"""What a figure shows of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from kvprobe.stats import Effect


@dataclass(frozen=True)
class PaperEntry:
    """Where the paper's value of an effect stands in the table of the paper's numbers."""

    experiment: str
    condition: str
    metric: str


@dataclass(frozen=True)
class Panel:
    """What a figure shows of one model.

    Args:
        model: its name.
        effects: by name; empty when the model was not measured or failed the gate.
        rows: the measurements that count.
        paper: the paper's value of an effect, by the effect's name.
        paper_model: the model of the paper they were measured on.
        note: why there are no effects, or with effects what they are of.
    """

    model: str
    effects: Mapping[str, Effect] = field(default_factory=dict)
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    paper: Mapping[str, float] = field(default_factory=dict)
    paper_model: str | None = None
    note: str = ""

    def select(self, condition: str, metric: str, **parameters: object) -> list[Effect]:
        """The effects of a condition and metric, in the order they were made.

        Args:
            condition: with its parameters by name: `suffix_{percent}`.
            metric: such as `recovery`.
            parameters: values that the condition's parameters must have; those not named may have any.
        """
        return [
            effect
            for effect in self.effects.values()
            if (effect.condition, effect.metric) == (condition, metric)
            and all(effect.parameters[name] == value for name, value in parameters.items())
        ]

    def curve(self, condition: str, metric: str, over: str | None = None, **parameters: object) -> dict[float, Effect]:
        """Effects by the value of one parameter, in rising order.

        Args:
            condition: as in `select`.
            metric: as in `select`.
            over: the parameter; by default the only one that is not fixed.
            parameters: the fixed ones.
        """
        found = self.select(condition, metric, **parameters)
        if not found:
            return {}
        (name,) = [over] if over else [name for name in found[0].parameters if name not in parameters]
        return dict(sorted((float(effect.parameters[name]), effect) for effect in found))

    def rows_of(self, effect: Effect) -> pd.DataFrame:
        """The rows that an effect of this panel was made of."""
        return effect.rows.select(self.rows) if effect.rows else self.rows.iloc[:0]
