"""Effects of edits: what an arm decides, how much more it recovers than another, and constant answers as baselines."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.probes.kit.edit_cases import BASELINES
from kvprobe.probes.kit.reading.differences import recovery_difference
from kvprobe.stats import Effect, Sample

__all__ = ["BASELINE_RATES", "arm_effects", "baseline_effects", "recovery_difference"]

BASELINE_RATES = tuple(f"baseline.{name}.correct_rate" for name in BASELINES)
"""What `baseline_effects` makes."""


def arm_effects(sample: Sample, condition: str) -> Iterator[Effect]:
    """`X.correct_rate`, the share of right decisions under the new value, and `X.recovery`.

    Args:
        sample: rows of one arm, with `margin`, `m_base`, `m_donor` (logits) and `correct`.
        condition: X.
    """
    yield sample.rate(f"{condition}.correct_rate", "correct")
    yield sample.recovery(f"{condition}.recovery")


def baseline_effects(sample: Sample) -> Iterator[Effect]:
    """`baseline.X.correct_rate` for each of `BASELINES`, over pairs: answers that read nothing of the prompt.

    `sample` has the columns of `baseline_columns`.
    """
    for name in BASELINES:
        column = f"baseline_{name}"
        if len(known := sample.measured(column)):
            yield known.per("pair", **{column: "first"}).mean(f"baseline.{name}.correct_rate", column)
