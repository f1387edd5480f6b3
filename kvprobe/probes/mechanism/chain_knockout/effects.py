"""What the rows of `chain_knockout` say."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvprobe.stats import Effect, StatisticsConfig, maximum, mean, proportion


def chain_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """All effects of the probe, from rows that passed the gate, with the cluster column."""
    floor = float(rows["noise_floor"].max())
    effects: list[Effect] = []
    arms = rows[rows["arm"] != "same_value"]
    for (arm, cache), part in arms.groupby(["arm", "cache"], sort=False):
        effects += _of_cell(f"{arm}.{cache}", str(arm), part, statistics, floor)
    for arm in [str(arm) for arm in arms["arm"].unique() if arm != "free"]:
        effects += _differences(arm, arms, statistics, floor)
    again, chains = rows[rows["arm"] == "same_value"], arms[arms["arm"] == "free"]
    shared: dict[str, Any] = {"statistics": statistics}
    effects += [
        maximum(
            "same_value.chain_changed",
            1.0 - again["same_chain"].astype(float),
            clusters=again[statistics.cluster],
            unit="fraction",
        ),
        proportion("free.censored", chains["censored"], clusters=chains[statistics.cluster], **shared),
        mean("free.length", chains["chain_tokens"], clusters=chains[statistics.cluster], unit="tokens", **shared),
        maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]),
    ]
    return effects


def _of_cell(name: str, arm: str, rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """`follows_new`; for a knockout also `margin_shift`; for one during the chain also what became of the chain."""
    shared: dict[str, Any] = {"clusters": rows[statistics.cluster], "statistics": statistics}
    effects = [proportion(f"{name}.follows_new", rows["margin"] > 0, **shared)]
    if arm != "free":
        shift = rows["margin"] - rows["free_margin"]
        effects.append(mean(f"{name}.margin_shift", shift, unit="logits", noise_floor=floor, **shared))
    if arm.startswith("block"):
        effects.append(proportion(f"{name}.chain_changed", ~rows["same_chain"].astype(bool), **shared))
    if arm == "free" or arm.startswith("block"):
        effects.append(proportion(f"{name}.names_new_value", rows["names_new_value"], **shared))
    return effects


def _differences(arm: str, rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """`drop`: how many decisions on the field-only cache no longer follow the new value under a knockout.

    `drop_over_new` is by how much that is more than on the new cache, where notes and field agree, and
    `field_difference` the same in logits of margin shift.
    """
    table = rows[rows["arm"].isin([arm, "free"])].assign(follows=(rows["margin"] > 0).astype(float))
    follows = table.pivot(index="pair", columns=["arm", "cache"], values="follows")
    margin = table.pivot(index="pair", columns=["arm", "cache"], values="margin")
    clusters = rows.groupby("pair")[statistics.cluster].first().loc[follows.index]
    drop = {cache: follows["free", cache] - follows[arm, cache] for cache in ("field_only", "new")}
    shift = {cache: margin[arm, cache] - margin["free", cache] for cache in ("field_only", "new")}
    shared: dict[str, Any] = {"clusters": clusters, "statistics": statistics}
    # Where no decision changes at all, the spread is 0; still one more pair might have.
    one = 1 / len(follows)
    return [
        mean(f"{arm}.drop", drop["field_only"], noise_floor=one, **shared),
        mean(f"{arm}.drop_over_new", drop["field_only"] - drop["new"], noise_floor=one, **shared),
        mean(
            f"{arm}.field_difference",
            shift["field_only"] - shift["new"],
            unit="logits",
            noise_floor=floor,
            **shared,
        ),
    ]
