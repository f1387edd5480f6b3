"""The field alone and growing suffixes of a prompt, transplanted from the donor (protocol 1.1 f, 1.2, 2.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.engine.cache import KVCache
from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import Measurement
from kvprobe.probes.kit.decisions import decision_row, read_patched
from kvprobe.probes.kit.measures import decision_effects
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.stats import Effect, StatisticsConfig, mean
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_ENOUGH = 0.8


def suffix(pair: Pair, fraction: float) -> tuple[int, ...]:
    """The last `fraction` of the positions from the field's start up to, not including, the decision token."""
    changed = range(pair.field.start, pair.decision_position)
    # Rounding up, but not for what floating point adds.
    return tuple(changed[-math.ceil(fraction * len(changed) - 1e-9) :])


def dose_interventions(pair: Pair, oracle: KVCache, fractions: Sequence[float]) -> dict[str, tuple[float, KVPatch]]:
    """By name, the fraction of the changed positions that is transplanted and the transplant."""
    field = tuple(pair.field.positions)
    changed = suffix(pair, 1.0)
    patches = {"field_only": (len(field) / len(changed), KVPatch(field, oracle))}
    for fraction in fractions:
        # The last few tokens of a prompt may hold nothing of the field, which is a result and no mistake.
        patches[suffix_name(fraction)] = (fraction, KVPatch(suffix(pair, fraction), oracle, no_op=True))
    return {**patches, "full_downstream": (1.0, KVPatch(changed, oracle))}


def suffix_name(fraction: float) -> str:
    """`suffix_5` for the last 5%."""
    return f"suffix_{round(100 * fraction)}"


def measure_dose(
    subject: Subject, pair: Pair, fractions: Sequence[float], batch_size: int | None = None
) -> list[Measurement]:
    """A row for each transplant, with its `fraction`, and the `distance` from field to decision in tokens."""
    unedited = prefill_pair(subject, pair)
    patches = dose_interventions(pair, unedited.oracle, fractions)
    readings = read_patched(
        subject, pair, pair.base, unedited.stale, [patch for _, patch in patches.values()], batch_size=batch_size
    )
    distance = pair.decision_position - pair.field.end + 1
    return [
        {
            **unedited.common(),
            **decision_row(name, unedited.base, reading, len(patch.positions)),
            "fraction": fraction,
            "distance": distance,
        }
        for (name, (fraction, patch)), reading in zip(patches.items(), readings, strict=True)
    ]


def dose_effects(rows: pd.DataFrame, group: str, statistics: StatisticsConfig) -> list[Effect]:
    """Effects of one group of pairs, each name beginning with `group` and a dot.

    `field_only.recovery`, `.margin_shift` and `.flip_rate`; `suffix_X.recovery` for each dose; `suffix_for_80`, the
    mean over pairs of the smallest suffix that recovers 0.8.
    """
    floor = float(rows["noise_floor"].max())
    effects: list[Effect] = []
    for intervention, part in rows.groupby("intervention", sort=False):
        named = decision_effects(part.assign(intervention=f"{group}.{intervention}"), statistics, floor)
        effects += named if intervention == "field_only" else named[:1]
    smallest = smallest_suffix(rows)
    clusters = rows.groupby("pair")[statistics.cluster].first().loc[smallest.index]
    # The true smallest suffix lies anywhere between this dose and the one below it.
    doses = [0.0, *sorted(rows.loc[rows["intervention"] != "field_only", "fraction"].unique())]
    step = sum(dose - doses[doses.index(dose) - 1] for dose in smallest) / len(smallest)
    effects.append(mean(f"{group}.suffix_for_80", smallest, clusters=clusters, statistics=statistics, noise_floor=step))
    return effects


def recoveries(rows: pd.DataFrame) -> pd.Series:
    """[row] recovery of each transplant on its own pair."""
    return (rows["margin"] - rows["m_base"]) / (rows["m_donor"] - rows["m_base"])


def smallest_suffix(rows: pd.DataFrame) -> pd.Series:
    """[pair] the smallest fraction of the changed positions, counted from the end, that recovers 0.8.

    All of them recover everything, so there always is one.
    """
    doses = rows[rows["intervention"] != "field_only"]
    enough = doses[(recoveries(doses) >= _ENOUGH) | (doses["intervention"] == "full_downstream")]
    return enough.groupby("pair")["fraction"].min()
