"""Effects of the field alone and of growing suffixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from kvprobe.probes.kit.reading.patching import DECISION, conditions, decision_effects
from kvprobe.stats import Effect, Sample, joined

_ENOUGH = 0.8


def dose_effects(sample: Sample, group: str) -> Iterator[Effect]:
    """Effects of one group of pairs.

    `X.field_only.recovery`, `.margin_shift` and `.flip_rate`; `X.suffix_{percent}.recovery` for each dose;
    `X.suffix_for_80`, the mean over pairs of the smallest suffix that recovers 0.8.

    Args:
        sample: rows of `measure_dose`.
        group: X, with its parameters by name.
    """
    sample = sample.with_floor(float(sample.rows["noise_floor"].max()))
    for condition, part in conditions(sample, "suffix_{percent}"):
        if condition == "field_only":
            yield from decision_effects(part, f"{group}.{condition}")
        else:
            yield part.recovery(f"{group}.{condition}.recovery")
    for pairs in smallest_suffixes(sample):
        # The true smallest suffix lies anywhere between this dose and the one below it.
        doses = [0.0, *sorted(sample.rows.loc[sample.rows["intervention"] != "field_only", "fraction"].unique())]
        smallest = pairs.rows["fraction"]
        step = sum(dose - doses[doses.index(dose) - 1] for dose in smallest) / len(smallest)
        yield pairs.mean(f"{group}.suffix_for_80", "fraction", noise_floor=step)


def dose_names(groups: Sequence[str], fractions: Sequence[float]) -> Iterator[str]:
    """Those of `dose_effects` of these groups and doses."""
    patches = ("full_downstream", *(f"suffix_{round(100 * fraction)}" for fraction in fractions))
    yield from joined(groups, (*joined("field_only", DECISION), *joined(patches, "recovery"), "suffix_for_80"))


def smallest_suffixes(sample: Sample, *columns: str) -> Iterator[Sample]:
    """[pair] the smallest `fraction` of the changed positions, counted from the end, that recovers 0.8.

    All of them recover everything, so there always is one. `columns` are kept. Nothing without the rows of all doses.
    """
    interventions = tuple(name for name in sample.rows["intervention"].unique() if name != "field_only")
    if "full_downstream" in interventions:
        doses = sample.of(intervention=interventions)
        enough = (doses.shift / doses.gap >= _ENOUGH) | (doses.rows["intervention"] == "full_downstream")
        yield doses.where(enough).per("pair", fraction="min", **dict.fromkeys(columns, "first"))


def recoveries(sample: Sample) -> pd.Series:
    """[row] recovery of each patch on its own pair."""
    return sample.shift / sample.gap
