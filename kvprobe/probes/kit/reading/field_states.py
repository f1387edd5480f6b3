"""Effects of decisions after edits of two fields: right by the current state, and like a full prefill of it."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.probes.kit.edit_cases import BASELINES
from kvprobe.stats import Effect, Sample

STATE = ("correct_rate", "error_rate")
"""What `state_effects` makes of a condition."""
AGAINST_PREFILL = ("agreement", "margin_error", "token_share")
"""What `against_prefill` makes of a condition."""


def state_effects(sample: Sample, condition: str) -> Iterator[Effect]:
    """`X.correct_rate` and `X.error_rate` for the condition X."""
    right = sample.rows["correct"].astype(float)
    yield sample.rate(f"{condition}.correct_rate", right)
    yield sample.rate(f"{condition}.error_rate", 1 - right)


def against_prefill(sample: Sample, condition: str) -> Iterator[Effect]:
    """`X.agreement` with a full prefill of the current state, `X.margin_error` (largest, logits), `X.token_share`.

    `token_share` is the mean over edits, and left out where none was made.
    """
    yield sample.rate(f"{condition}.agreement", "agrees")
    yield sample.maximum(f"{condition}.margin_error", "margin_error")
    if len(edits := sample.measured("token_share")):
        yield edits.mean(f"{condition}.token_share", "token_share")


def shared_effects(sample: Sample) -> Iterator[Effect]:
    """Errors of the full prefill itself, constant baselines and noise, from the rows of any one arm."""
    if len(sample):
        yield sample.rate("full_prefill.error_rate", 1 - sample.rows["prefill_correct"].astype(float))
        for name in BASELINES:
            yield sample.mean(f"baseline.{name}.correct_rate", f"baseline_{name}")
        yield sample.maximum("noise.margin", "noise_floor")
