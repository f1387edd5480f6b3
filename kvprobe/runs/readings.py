"""Effects from rows: read when a model was measured, and again where its summary leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import overload

import pandas as pd

from kvprobe.probes.base import Probe
from kvprobe.probes.gating import about_decisions
from kvprobe.runs.gate import GateReport, Grade
from kvprobe.stats import Effect, Sample, StatisticsConfig


def read_effects(
    probe: Probe, rows: pd.DataFrame, statistics: StatisticsConfig, gate: GateReport | None = None
) -> tuple[Effect, ...]:
    """The effects of one model; on margins alone, those that are not about decisions.

    Args:
        probe: that measured the rows.
        rows: of the model that count.
        statistics: of the experiment.
        gate: of the model. The probe never sees the pairs that it left out, but every effect must tell of them.
    """
    sample = Sample.of_model(rows.reset_index(drop=True), statistics)
    effects = probe.read_by().read(probe, sample)
    excluded, on_margins = (gate.excluded, gate.grade is Grade.MARGIN) if gate else (0, False)
    kept = (effect for effect in effects if not (on_margins and about_decisions(effect)))
    return tuple(replace(effect, excluded=effect.excluded + excluded) for effect in kept)


class EffectsOfRows(Sequence[Effect]):
    """The effects of a model of which its summary keeps some; all are read from its rows once others are asked for.

    Args:
        kept: those of the summary.
        left_out: how many others there were.
        read: reads all of them.
    """

    def __init__(self, kept: tuple[Effect, ...], left_out: int, read: Callable[[], tuple[Effect, ...]]) -> None:
        self.kept, self.left_out = kept, left_out
        self._read = read

    @cached_property
    def _all(self) -> tuple[Effect, ...]:
        return self._read()

    def __iter__(self) -> Iterator[Effect]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __bool__(self) -> bool:
        return bool(self.kept or self.left_out)

    @overload
    def __getitem__(self, place: int) -> Effect: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Effect, ...]: ...
    def __getitem__(self, place: int | slice) -> Effect | tuple[Effect, ...]:
        return self._all[place]

    def __eq__(self, other: object) -> bool:
        return self._all == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]
