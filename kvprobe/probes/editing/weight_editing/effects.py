"""Effects of the weight-editing probe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.probes.editing.weight_editing.arms import COLLATERAL, EDITED_PREFIX, TARGET
from kvprobe.probes.editing.weight_editing.concurrent_requests import OTHER_WORDING, OWN_PREFIX, SHARED_PREFIX
from kvprobe.probes.kit.edit_cases import baseline_effects
from kvprobe.probes.kit.measures import pair_noise
from kvprobe.stats import Effect, StatisticsConfig, maximum, median, proportion

_FLIPPED = {
    "contamination": (SHARED_PREFIX, OWN_PREFIX),
    "contamination_on_shared_prefix": (SHARED_PREFIX,),
    "other_wording": (OTHER_WORDING,),
    "contamination_by_edited_prefix": (EDITED_PREFIX,),
}


def weight_editing_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """By arm, then the constant baselines and what must hold of all arms.

    `X.validation.switched`, `.kept` and `X.usable` (1 or 0), `X.efficacy`, `X.contamination` and its like (share of
    decisions by the old value that flip), `X.collateral` (share that changes), `X.latency` (median, in full
    reprefills), `weights.bit_equal` (share of edits after which they were).
    """
    for arm, part in rows.groupby("arm", sort=False):
        yield from _arm_effects(str(arm), part, statistics)
    edits = rows[rows["weights_equal"].notna() & (rows["prompt"] == TARGET)]
    if len(edits):
        equal, clusters = edits["weights_equal"].astype(float), edits[statistics.cluster]
        yield proportion("weights.bit_equal", equal, clusters=clusters, statistics=statistics)
    yield from baseline_effects(rows, statistics)
    yield pair_noise(rows, statistics)


def _validation_effects(arm: str, found: pd.Series, statistics: StatisticsConfig) -> Iterator[Effect]:
    """Of one model's validation, which all rows of the arm repeat."""
    for name, count in (("switched", "edits"), ("kept", "neighbours")):
        total = int(found[f"validation_{count}"])
        successes = np.arange(total) < round(found[f"validation_{name}"] * total)
        yield proportion(f"{arm}.validation.{name}", successes, statistics=statistics)
    yield maximum(f"{arm}.usable", [float(found["usable"])], unit="fraction")


def _arm_effects(arm: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    if rows["validation_switched"].notna().any():
        yield from _validation_effects(arm, rows.iloc[0], statistics)
    decided = rows[rows["margin"].notna()]
    target = decided[decided["prompt"] == TARGET]
    if not len(target):
        return
    shared: dict[str, Any] = {"clusters": target[statistics.cluster], "statistics": statistics}
    yield proportion(f"{arm}.efficacy", target["new"].astype(float), **shared)
    ratio = (target["seconds"] / target["reprefill_seconds"]).astype(float)
    yield median(f"{arm}.latency", ratio, unit="reprefills", **shared)
    for name, prompts in _FLIPPED.items():
        part = decided[decided["prompt"].isin(prompts)]
        # Of those that decided by their own, old value before; of the others nothing can be flipped.
        old = part[~part["new_before"].astype(bool)]
        if len(old):
            flipped, clusters, left_out = old["new"].astype(float), old[statistics.cluster], len(part) - len(old)
            yield proportion(f"{arm}.{name}", flipped, clusters=clusters, statistics=statistics, excluded=left_out)
    part = decided[decided["prompt"] == COLLATERAL]
    if len(part):
        changed, clusters = part["changed"].astype(float), part[statistics.cluster]
        yield proportion(f"{arm}.collateral", changed, clusters=clusters, statistics=statistics)
