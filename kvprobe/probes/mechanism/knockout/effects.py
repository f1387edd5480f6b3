"""What the rows of `knockout` say: shifts and flips by cache, and differences between caches and between key sets."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvprobe.stats import Effect, StatisticsConfig, maximum, mean, proportion, ratio_of_sums

# Sets of equal mass are matched to the positions of high effect alone.
CONTROLS = {"effect": ("random", "equal_mass", "low_effect"), "attention": ("random", "low_effect")}


def knockout_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """All effects of the probe, from rows that passed the gate, with the cluster column."""
    masked = rows[rows["intervention"] != "none"]
    effects: list[Effect] = []
    for name, part in masked[masked["intervention"] != "empty"].groupby("intervention", sort=False):
        effects += _by_cache(str(name), part, statistics)
        effects += _between_caches(str(name), part, statistics)
    effects += _unmasked(rows[rows["intervention"] == "none"], statistics)
    effects += _over_controls(masked, statistics)
    empty = masked[masked["intervention"] == "empty"]
    error = (empty["margin"] - empty["unmasked"]).abs()
    effects.append(maximum("empty.error", error, clusters=empty[statistics.cluster]))
    effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
    return effects


def _by_cache(name: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """`follows_new`, `flip_rate` and `margin_shift` on each cache, and the attention mass that is hidden."""
    effects = []
    for cache, part in rows.groupby("cache", sort=False):
        shared: dict[str, Any] = {"clusters": part[statistics.cluster], "statistics": statistics}
        floor = float(part["noise_floor"].max())
        shift = part["margin"] - part["unmasked"]
        effects += [
            proportion(f"{name}.{cache}.follows_new", part["margin"] > 0, **shared),
            proportion(f"{name}.{cache}.flip_rate", part["flipped"].astype(float), **shared),
            mean(f"{name}.{cache}.margin_shift", shift, unit="logits", noise_floor=floor, **shared),
        ]
    one = rows[rows["cache"] == "stale"]
    effects.append(
        mean(
            f"{name}.attention_mass",
            one["attention_mass"],
            clusters=one[statistics.cluster],
            statistics=statistics,
            unit="attention mass",
        )
    )
    return effects


def _unmasked(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    return [
        proportion(
            f"none.{cache}.follows_new",
            part["margin"] > 0,
            clusters=part[statistics.cluster],
            statistics=statistics,
        )
        for cache, part in rows.groupby("cache", sort=False)
    ]


def _between_caches(name: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """`erased`, `field_difference` and `default_shift` of one key set (critique ME3)."""
    shift, pairs = _shifts(rows), rows.groupby("pair").first()
    shared: dict[str, Any] = {"statistics": statistics, "noise_floor": float(rows["noise_floor"].max())}
    effects = [
        _share_of_gap(f"{name}.{contrast}", values, pairs, **shared) for contrast, values in _contrasts(shift).items()
    ]
    if "swapped" in shift:
        default = ((shift["stale"] + shift["swapped"]) / 2).dropna()
        clusters = pairs.loc[default.index, statistics.cluster]
        effects.append(mean(f"{name}.default_shift", default, clusters=clusters, unit="logits", **shared))
    return effects


def _over_controls(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """By how much more the positions of high effect, or of high attention, do than control sets of the same budget."""
    effects = []
    pairs, floor = rows.groupby("pair").first(), float(rows["noise_floor"].max())
    by_name = {str(name): _contrasts(_shifts(part)) for name, part in rows.groupby("intervention", sort=False)}
    for kind, controls in CONTROLS.items():
        for name in [name for name in by_name if name.removeprefix(f"{kind}_").isdigit()]:
            percent = name.removeprefix(f"{kind}_")
            for control in controls:
                other = by_name.get(f"{control}_{percent}")
                if other is None:
                    continue
                for contrast, values in by_name[name].items():
                    label = f"{name}_over_{control}.{contrast}"
                    difference = values - other[contrast]
                    effects.append(_share_of_gap(label, difference, pairs, statistics=statistics, noise_floor=floor))
    return effects


def _shifts(rows: pd.DataFrame) -> pd.DataFrame:
    """[pair, cache] margin shift in logits, the mean over draws."""
    table = rows.assign(shift=rows["margin"] - rows["unmasked"])
    return table.pivot_table(index="pair", columns="cache", values="shift", aggfunc="mean")


def _contrasts(shift: pd.DataFrame) -> dict[str, pd.Series]:
    return {
        "erased": shift["stale"] - shift["new"],
        "field_difference": shift["field_only"] - shift["stale"],
    }


def _share_of_gap(
    name: str, values: pd.Series, pairs: pd.DataFrame, *, statistics: StatisticsConfig, noise_floor: float
) -> Effect:
    there = pairs.loc[values.index]
    return ratio_of_sums(
        name,
        values,
        there["m_donor"] - there["m_base"],
        clusters=there[statistics.cluster],
        statistics=statistics,
        noise_floor=noise_floor,
    )
