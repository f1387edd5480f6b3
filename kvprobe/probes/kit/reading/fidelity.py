"""Effects of composed prompts: how far they decide as a full prefill of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from kvprobe.probes.kit.fidelity import ReuseArm
from kvprobe.stats import Effect, Sample, equivalent

_LEAST_SHARE = 0.2
"""Share of each answer that a reference must give for kappa to say something (critique G8)."""
_SAME = 1e-12
"""Spread, relative to the largest, below which numbers differ by rounding alone."""
KAPPA_MAY_LACK = {"*.kappa": "The reference gives one of the answers in fewer than a fifth of the prompts."}
FIDELITY = (
    *("agreement", "accuracy", "same_argmax", "kappa", "kl", "js", "total_variation", "top_overlap"),
    *("margin_error", "margin_retained", "cosine"),
)
"""What `fidelity_effects` makes of a condition."""
PROMPT = ("pair", "prompt")
"""What two arms have in common."""


def by_arm(sample: Sample, arms: Sequence[ReuseArm]) -> Iterator[tuple[str, Sample]]:
    """Each measured arm's kind, such as `seam_{seam}`, and its rows, which know the sizes in it."""
    for arm in arms:
        if len(part := sample.of(arm=arm.name)):
            yield arm.kind, part.named(**arm.sizes)


def by_pair(sample: Sample, column: str, by: str) -> pd.DataFrame:
    """[pair] a column under each value of `by`, and the cluster."""
    table = sample.rows.pivot(index="pair", columns=by, values=column)
    clusters = sample.rows.groupby("pair")[sample.statistics.cluster].first()
    return table.assign(**{sample.statistics.cluster: clusters})


def fidelity_effects(sample: Sample, condition: str, *, equivalence: float = 0.1) -> Iterator[Effect]:
    """Effects of one way of composing.

    `X.agreement`, `X.kappa`, `X.same_argmax` with the full prefill; `X.accuracy` (right decisions); `X.kl`, `X.js` (in
    nats), `X.total_variation`, `X.top_overlap`; `X.margin_error` (mean absolute, in logits); `X.margin_retained` (the
    right answer's margins, summed, over the reference's; `extra` has the p value of the test that they differ by less
    than `equivalence` of the mean); `X.cosine`.

    Args:
        sample: rows of `Reference.compare`, with `noise_floor` (logits).
        condition: X.
        equivalence: largest share of the mean reference margin that counts as no difference.
    """
    rows = sample.rows
    floor = float(rows["noise_floor"].max())
    for metric, column in (("agreement", "agrees"), ("accuracy", "correct"), ("same_argmax", "same_argmax")):
        yield sample.rate(f"{condition}.{metric}", column)
    share = float(rows["reference_answers_donor"].astype(float).mean())
    if _LEAST_SHARE <= share <= 1 - _LEAST_SHARE:
        answers = rows["answers_donor"].astype(int), rows["reference_answers_donor"].astype(int)
        yield sample.kappa(f"{condition}.kappa", *answers)
    for metric in ("kl", "js"):
        yield sample.mean(f"{condition}.{metric}", metric, "nats")
    for metric in ("total_variation", "top_overlap"):
        yield sample.mean(f"{condition}.{metric}", metric)
    yield sample.mean(f"{condition}.margin_error", "margin_error", "logits", noise_floor=floor)
    yield _retained(sample, condition, equivalence, floor)
    yield sample.mean(f"{condition}.cosine", "cosine", "cosine")


def _retained(sample: Sample, condition: str, equivalence: float, floor: float) -> Effect:
    effect = sample.ratio(f"{condition}.margin_retained", "margin", "reference_margin", noise_floor=floor)
    clusters, reference = sample.clusters, sample.rows["reference_margin"]
    if clusters.nunique() < 2:
        return effect
    bound = equivalence * float(reference.abs().mean())
    difference = sample.rows["margin"] - reference
    means = difference.groupby(list(clusters)).mean()
    # Cluster means that are all the same have no spread to test with; they lie within the bound or do not.
    if float(np.ptp(means)) <= _SAME * float(means.abs().max()):
        p_value = float(abs(float(means.iloc[0])) >= bound)
    else:
        p_value = equivalent(difference, bound, clusters=list(clusters)).p_value
    return replace(effect, extra={**effect.extra, "equivalence_bound": bound, "equivalence_p_value": p_value})
