"""Probes that hold their effects and figures themselves; goes when the last of them is apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
from pydantic import BaseModel, ConfigDict

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import base
from kvprobe.stats import Effect, Sample, StatisticsConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Parameters(BaseModel):
    """Base of all probes' parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Reading:
    def __init__(self, probe: Any) -> None:
        self.probe, self.paper, self.may_lack = probe, probe.paper, probe.may_lack

    def read(self, probe: Any, sample: Sample) -> list[Effect]:
        return list(probe.summarise(sample.rows, sample.statistics))

    def draw(self, panels: Sequence[Panel]) -> Any:
        return self.probe.plot(panels)

    @property
    def has_main(self) -> bool:
        return type(self.probe).plot_main is not Probe.plot_main

    def draw_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        self.probe.plot_main(axes, panels)


class Probe(ABC):
    """As probes were: `summarise`, `plot` and `plot_main` beside `measure`."""

    name: ClassVar[str]
    needs_all_pairs: ClassVar[bool] = False
    paper: ClassVar[Mapping[str, PaperEntry]] = {}
    may_lack: ClassVar[Mapping[str, str]] = {}
    Parameters: ClassVar[type[Parameters]] = Parameters
    parameters: Any

    def __init__(self, parameters: Any = None) -> None:
        self.parameters = parameters if parameters is not None else self.Parameters()

    measure = base.Probe.measure
    refusal = base.Probe.refusal
    preview = base.Probe.preview

    def read_by(self) -> Any:
        """The probe's reading."""
        return _Reading(self)

    def model_dump(self, **how: Any) -> dict[str, Any]:
        """The parameters as plain values."""
        return dict(self.parameters.model_dump(**how))

    @classmethod
    def model_validate(cls, values: Any) -> Any:
        """The probe with these parameters."""
        return cls(cls.Parameters.model_validate(values))

    @abstractmethod
    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Effects of one model."""

    @abstractmethod
    def plot(self, panels: Sequence[Panel]) -> Figure:
        """One figure over all models."""

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:  # noqa: B027
        """The probe's axes in the section's figure."""
