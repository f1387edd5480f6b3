"""What a run will take, from a rehearsal of a few of its pairs that writes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe.errors import KvprobeError
from kvprobe.runs.preparation import Plan, Preparation, prepare
from kvprobe.runs.subjects import SubjectLoader
from kvprobe.tasks.pairs import Pair

# Few pairs are enough for the time of one; probes that cut pairs into folds need several.
_FIRST, _MOST = 2, 16


@dataclass(frozen=True)
class Forecast:
    """What one model of an experiment will take.

    Args:
        model: its name.
        pairs: that align with its tokenizer.
        peak_bytes: of weights, caches and passes at their largest; the process itself is left out.
        seconds: of measuring all pairs at the pace of the rehearsal; `None` where it could not be rehearsed.
        rehearsed: pairs measured for it.
        reason: why there is no time, one sentence; else empty.
    """

    model: str
    pairs: int
    peak_bytes: int | None
    seconds: float | None
    rehearsed: int
    reason: str = ""


def forecast(plan: Plan, name: str, load_subject: SubjectLoader) -> Forecast:
    """Load the model, measure a few pairs as the run would, and say what all will take.

    A model that cannot be loaded or rehearsed leaves one sentence. The pace is that of this moment: nothing else
    should run meanwhile, and fixed costs of the first pairs make it an upper estimate.
    """
    try:
        prepared = prepare(name, plan.pairs, plan.config, load_subject)
    except KvprobeError as error:
        return Forecast(name, 0, None, None, 0, str(error))
    pairs = prepared.pairs
    if not pairs:
        return Forecast(name, 0, None, None, 0, prepared.first_misfit)
    peak = prepared.peak_bytes
    count, reason = min(_FIRST, len(pairs)), ""
    while count <= min(_MOST, len(pairs)):
        try:
            seconds = _measured(plan, prepared, pairs[:count])
        except KvprobeError as refused:
            reason, count = str(refused), count * 2
        else:
            return Forecast(name, len(pairs), peak, seconds / count * len(pairs), count)
    return Forecast(name, len(pairs), peak, None, 0, reason)


def _measured(plan: Plan, prepared: Preparation, pairs: Sequence[Pair]) -> float:
    began = time.monotonic()
    plan.probe.measure(prepared.subject, pairs, _unheard)
    return time.monotonic() - began


def _unheard(*_: Any) -> None:
    """A rehearsal is short enough to be silent."""
