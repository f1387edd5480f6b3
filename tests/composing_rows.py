"""Rows and effects of probes: measured on a model, or made by hand with the columns that fidelity is read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvprobe.models.subject import Subject
from kvprobe.probes.base import Probe
from kvprobe.stats import Effect, Sample, StatisticsConfig
from kvprobe.tasks.pairs import Pair


def measured(probe: Probe, subject: Subject, pairs: Sequence[Pair]) -> pd.DataFrame:
    """The rows that a probe measures, with the skeleton of each."""
    rows = pd.DataFrame(probe.measure(subject, pairs, lambda done, total: None))
    return rows.assign(skeleton=[pairs[pair].scenario.skeleton for pair in rows["pair"]])


def effects_of(probe: Probe, rows: pd.DataFrame) -> dict[str, Effect]:
    """What a probe reads from rows that all count, by name."""
    return {e.name: e for e in probe.read_by().read(probe, Sample.of_model(rows, StatisticsConfig()))}


def decided(side: str, error: float = 0.0, *, margin: float = 5.0, agrees: bool = True) -> dict[str, Any]:
    """The columns of a composed decision whose reference is right by `margin` logits, and which is off by `error`.

    Where it does not agree it gives the other prompt's answer.
    """
    donor = side == "donor"
    return {
        "prompt": side,
        "margin": margin - error,
        "reference_margin": margin,
        "margin_error": error,
        "correct": agrees,
        "agrees": agrees,
        "same_argmax": agrees,
        "answers_donor": donor == agrees,
        "reference_answers_donor": donor,
        "kl": error,
        "js": 0.0,
        "total_variation": 0.0,
        "top_overlap": 1.0,
        "cosine": 1.0,
        "noise_floor": 1e-9,
    }
