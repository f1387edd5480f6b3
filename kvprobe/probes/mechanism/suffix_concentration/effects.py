"""What the rows of `suffix_concentration` say: recoveries of sets, shares of single positions, and floors."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvprobe.probes.kit.measures import decision_effects
from kvprobe.stats import Effect, StatisticsConfig, maximum, mean, median, ratio_of_sums

# A pair's suffix is sufficient from this recovery on (protocol 1.2).
SUFFICIENT = 0.8


def concentration_effects(rows: pd.DataFrame, statistics: StatisticsConfig, control_size: int) -> list[Effect]:
    """All effects of the probe, from rows that passed the gate.

    Args:
        rows: as `SuffixConcentration.measure` makes them, with the cluster column.
        statistics: of the experiment.
        control_size: number of positions in each random set.
    """
    floor = float(rows["noise_floor"].max())
    singles = rows[rows["intervention"] == "position"]
    effects: list[Effect] = []
    for _, part in rows[rows["intervention"] != "position"].groupby("intervention", sort=False):
        effects += decision_effects(part, statistics, floor)
    effects += _over_random(rows, statistics, floor, control_size)
    effects += _single_layers(rows[rows["intervention"].str.match(r"layer_\d+$")], statistics, floor)
    effects += position_shares(singles, statistics)
    effects += _single_recoveries(singles, statistics, floor)
    effects += _smallest_suffix(rows[rows["intervention"].str.match(r"suffix_\d+$")], statistics)
    for intervention, ought in (("suffix_100", "m_donor"), ("no_op", "m_base"), ("same_value", "m_base")):
        part = rows[rows["intervention"] == intervention]
        if len(part):
            error = (part["margin"] - part[ought]).abs()
            effects.append(maximum(f"{intervention}.error", error, clusters=part[statistics.cluster]))
    effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
    return effects


def _over_random(rows: pd.DataFrame, statistics: StatisticsConfig, floor: float, size: int) -> list[Effect]:
    """By how much the top positions, ranked on other skeletons, recover more than random sets of their size."""
    shift = rows.assign(shift=rows["margin"] - rows["m_base"]).groupby(["intervention", "pair"])["shift"].mean()
    if f"top_held_out_{size}" not in shift.index.get_level_values("intervention"):
        return []
    pairs = rows.groupby("pair").first()
    effects = []
    for control in ("random", "matched"):
        difference = shift[f"top_held_out_{size}"] - shift[f"{control}_{size}"]
        effects.append(
            ratio_of_sums(
                f"top_{size}_over_{control}.recovery",
                difference,
                (pairs["m_donor"] - pairs["m_base"]).loc[difference.index],
                clusters=pairs.loc[difference.index, statistics.cluster],
                statistics=statistics,
                noise_floor=floor,
            )
        )
    return effects


def _single_layers(rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """`single_layer_T.recovery`: what one layer of a third of the depth recovers alone, on average."""
    return [
        ratio_of_sums(
            f"single_layer_{third}.recovery",
            part["margin"] - part["m_base"],
            part["m_donor"] - part["m_base"],
            clusters=part[statistics.cluster],
            statistics=statistics,
            noise_floor=floor,
        )
        for third, part in rows.groupby("depth", sort=False)
    ]


def position_shares(singles: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """How the positive recovery of single positions is spread over segments and kinds of token (protocol 1.7).

    For each group X: `mass.X`, the share of a pair's positive recovery that lies in it, and `density.X`, that share
    over the group's share of tokens. Recovery within the noise floor counts as none; a pair without any is excluded.
    """
    toward = (singles["m_donor"] - singles["m_base"]).apply(lambda gap: 1.0 if gap > 0 else -1.0)
    gain = (singles["margin"] - singles["m_base"]) * toward
    table = singles.assign(gain=gain.where(gain > singles["noise_floor"], 0.0), one=1.0)
    totals = table.groupby("pair")[["gain", "one"]].transform("sum")
    silent = int(table.loc[totals["gain"] == 0, "pair"].nunique())
    table = table[totals["gain"] > 0]
    if table.empty:
        return []
    totals = totals.loc[table.index]
    table = table.assign(mass=table["gain"] / totals["gain"], tokens=table["one"] / totals["one"])
    pairs = table.groupby("pair")
    clusters = pairs[statistics.cluster].first()
    effects = []
    for name, inside in _groups(table).items():
        shares = table[inside].groupby("pair")[["mass", "tokens"]].sum().reindex(clusters.index, fill_value=0.0)
        shared: dict[str, Any] = {"clusters": clusters, "statistics": statistics, "excluded": silent}
        label = "share" if name == "delimiter" else None
        effects.append(mean(f"{name}.{label}" if label else f"mass.{name}", shares["mass"], **shared))
        if shares["tokens"].sum() > 0:
            density = f"{name}.density" if label else f"density.{name}"
            effects.append(ratio_of_sums(density, shares["mass"], shares["tokens"], unit="ratio", **shared))
    return effects


def _groups(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Which rows belong to each segment, to all that follows the rule, and to the delimiters."""
    groups = {str(name): table["segment"] == name for name in table["segment"].unique()}
    if "policy" in groups:
        last = table[groups["policy"]].groupby("pair")["position"].max()
        groups["after_policy"] = table["position"] > table["pair"].map(last).fillna(float("inf"))
    groups["delimiter"] = table["delimiter"].astype(bool)
    return groups


def _single_recoveries(singles: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """Mean recovery of one position by segment (`single_in_X`), and what all positions recover alone, added up."""
    table = singles.assign(shift=singles["margin"] - singles["m_base"], gap=singles["m_donor"] - singles["m_base"])
    effects = []
    for segment, part in table.groupby("segment", sort=False):
        effects.append(
            ratio_of_sums(
                f"single_in_{segment}.recovery",
                part["shift"],
                part["gap"],
                clusters=part[statistics.cluster],
                statistics=statistics,
                noise_floor=floor,
            )
        )
    pairs = table.groupby("pair").agg(shift=("shift", "sum"), gap=("gap", "first"), group=(statistics.cluster, "first"))
    effects.append(
        ratio_of_sums(
            "sum_of_singles.recovery",
            pairs["shift"],
            pairs["gap"],
            clusters=pairs["group"],
            statistics=statistics,
            noise_floor=floor * len(singles) / len(pairs),
        )
    )
    return effects


def _smallest_suffix(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """`sufficient_suffix.fraction`: the smallest fraction of a pair from which on every suffix suffices."""
    if rows.empty:
        return []
    recovery = (rows["margin"] - rows["m_base"]) / (rows["m_donor"] - rows["m_base"])
    table = rows.assign(short=recovery < SUFFICIENT)
    fractions = sorted(table["fraction"].unique())
    following = dict(zip(fractions, [*fractions[1:], fractions[-1]], strict=True))
    smallest = {}
    for pair, part in table.groupby("pair"):
        too_short = part.loc[part["short"], "fraction"]
        smallest[pair] = following[too_short.max()] if len(too_short) else fractions[0]
    clusters = table.groupby("pair")[statistics.cluster].first()
    values = pd.Series(smallest)
    return [median("sufficient_suffix.fraction", values, clusters=clusters.loc[values.index], statistics=statistics)]
