"""Effects of the heads probe, from its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from kvprobe.probes.kit.measures import decision_effects, over_draws
from kvprobe.stats import Effect, StatisticsConfig, maximum, mean, proportion, ratio_of_sums


def head_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """Effects of the heads probe.

    `X_k.recovery`, `.margin_shift` and `.flip_rate` of each set (mean over draws); `read_indirect_k.recovery`, what
    later heads add; `X_k.reach_rate`, the share of random sets that move the decision as far as the held-out set;
    `ablate_X_k.gap_retained` and `.accuracy`; rank correlations over the heads of a pair; `noise.margin`.

    Args:
        rows: of `Heads.measure`, with the cluster column.
        statistics: of the experiment.
    """
    floor = float(rows["noise_floor"].max())
    sets = dict(list(rows[rows["measurement"] == "set"].groupby("intervention", sort=False)))
    effects: list[Effect] = []
    for part in sets.values():
        effects += decision_effects(over_draws(part, statistics), statistics, floor)
    effects += list(_indirect(sets, statistics, floor))
    effects += list(_reached(sets, statistics))
    effects += _others(rows, statistics, floor)
    for _, part in rows[rows["measurement"] == "ablation"].groupby("intervention", sort=False):
        effects += _ablation(part, statistics, floor)
    effects += _correlations(rows, statistics)
    clusters = rows.groupby("pair")[[statistics.cluster, "noise_floor"]].first()
    effects.append(maximum("noise.margin", clusters["noise_floor"], clusters=clusters[statistics.cluster]))
    return effects


def _indirect(sets: dict[Any, pd.DataFrame], statistics: StatisticsConfig, floor: float) -> Iterator[Effect]:
    """What a set does through later heads: all that it does less what it does with them frozen."""
    for name, direct in sets.items():
        if not name.startswith("read_direct_"):
            continue
        whole = sets[name.replace("direct", "held_out")].set_index("pair")
        alone = direct.set_index("pair").loc[whole.index]
        yield ratio_of_sums(
            name.replace("direct", "indirect") + ".recovery",
            whole["margin"] - alone["margin"],
            whole["m_donor"] - whole["m_base"],
            clusters=whole[statistics.cluster],
            statistics=statistics,
            noise_floor=floor,
        )


def _reached(sets: dict[Any, pd.DataFrame], statistics: StatisticsConfig) -> Iterator[Effect]:
    """The share of random sets that move the decision at least as far as the held-out set of their size."""
    for name, drawn in sets.items():
        kind, control, size = name.split("_", 1)[0], name.split("_")[1], name.rsplit("_", 1)[1]
        best = sets.get(f"{kind}_held_out_{size}")
        if control not in ("random", "matched") or best is None:
            continue
        reached = drawn["margin"].to_numpy() >= best.set_index("pair").loc[drawn["pair"], "margin"].to_numpy()
        yield proportion(f"{name}.reach_rate", reached, clusters=drawn[statistics.cluster], statistics=statistics)


def _others(rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """Single read heads outside the largest held-out set."""
    largest = rows.loc[rows["intervention"].fillna("").str.startswith("read_held_out_"), "size"].max()
    outside = rows[(rows["measurement"] == "head") & (rows["rank"] >= largest)]
    if outside.empty:
        return []
    flipped = (outside["margin"] > 0) != (outside["m_base"] > 0)
    named = outside.assign(intervention="read_single_others", flipped=flipped)
    return decision_effects(over_draws(named, statistics), statistics, floor)


def _ablation(rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    name = rows["intervention"].iloc[0]
    shared: dict[str, Any] = {"clusters": rows[statistics.cluster], "statistics": statistics}
    left = rows["margin_donor_ablated"] - rows["margin_base_ablated"]
    right = pd.concat([rows["margin_base_ablated"] < 0, rows["margin_donor_ablated"] > 0])
    both = pd.concat([rows[statistics.cluster]] * 2)
    gap = rows["m_donor"] - rows["m_base"]
    return [
        ratio_of_sums(f"{name}.gap_retained", left, gap, noise_floor=2 * floor, **shared),
        proportion(f"{name}.accuracy", right.astype(float), clusters=both, statistics=statistics),
    ]


def _correlations(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """Rank correlations over the heads of each pair, averaged over pairs (critique CI2).

    `effect_attention`: a read head's effect and its attention to held-out notes; `effect_attribution`,
    `write_attribution`: exact effect and first-order estimate.
    """
    compared = {
        "effect_attention": ("head", "attention"),
        "effect_attribution": ("head", "attribution"),
        "write_attribution": ("write_head", "attribution"),
    }
    effects = []
    for name, (kind, column) in compared.items():
        found = []
        for _, part in rows[rows["measurement"] == kind].groupby("pair"):
            shift = (part["margin"] - part["m_base"]).to_numpy(dtype=float)
            other = part[column].to_numpy(dtype=float)
            # Where all heads are equal there is no order to compare.
            if np.ptp(shift) > 0 and np.ptp(other) > 0:
                found.append((float(spearmanr(shift, other).statistic), part[statistics.cluster].iloc[0]))
        if found:
            values, clusters = zip(*found, strict=True)
            effects.append(
                mean(
                    f"{name}.rank_correlation",
                    list(values),
                    clusters=pd.Series(clusters),
                    statistics=statistics,
                    unit="rank correlation",
                )
            )
    return effects
