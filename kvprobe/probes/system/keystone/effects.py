"""What the keystone's rows amount to: arms by regime, composed regimes against the recomputed one, ways back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from kvprobe.probes.kit.edit_arms import arm_effects, recovery_differences
from kvprobe.stats import Effect, StatisticsConfig, equivalent, maximum, mean, proportion, ratio_of_sums
from kvprobe.stats.intervals import mean_of_ratios

RECOMPUTED = "recomputed"
REFERENCE = "full_reprefill"
STALE = "stale"
_NO_EDITS = (STALE, REFERENCE)
_CHOOSING = ("selective_", "deviation_", "cacheblend_")


def edit_groups(arms: Sequence[str]) -> dict[str, list[str]]:
    """All edits, and those that run the same tokens whatever is in the cache, where others choose by what is in it."""
    return {"every_arm": list(arms), "fixed_edits": [arm for arm in arms if not arm.startswith(_CHOOSING)]}


def arm_summaries(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """Correctness, recovery, cost and distance to the target of every arm in every regime."""
    floor = float(rows["noise_floor"].max())
    reference = rows[rows["arm"] == REFERENCE].set_index("pair")["tokens"]
    for (regime, arm), part in rows.groupby(["regime", "arm"], sort=False):
        name = f"{regime}.{arm}"
        shared: dict[str, Any] = {"clusters": part[statistics.cluster], "statistics": statistics}
        yield from arm_effects(name, part, statistics, floor)
        yield ratio_of_sums(f"{name}.token_share", part["tokens"], reference.loc[part["pair"]], **shared)
        yield mean(f"{name}.kl", part["kl"], unit="nats", **shared)
        yield proportion(f"{name}.agreement", part["same_argmax"].astype(float), **shared)


def comparisons(rows: pd.DataFrame, margin: float, statistics: StatisticsConfig) -> Iterator[Effect]:
    """Each composed regime against the recomputed one on the same pairs, arm by arm and over all edits."""
    arms = [arm for arm in rows["arm"].unique() if arm != REFERENCE]
    ours = rows[rows["regime"] == RECOMPUTED].set_index(["arm", "pair"])["margin"]
    named = rows.assign(arm=rows["regime"] + "." + rows["arm"])
    for regime, part in rows[rows["regime"] != RECOMPUTED].groupby("regime", sort=False):
        apart = part.assign(
            apart=part["margin"] - ours.loc[list(zip(part["arm"], part["pair"], strict=True))].to_numpy()
        )
        names = {f"{regime}.{arm}.difference": (f"{regime}.{arm}", f"{RECOMPUTED}.{arm}") for arm in arms}
        tests = {}
        for effect, arm in zip(recovery_differences(named, names, statistics), arms, strict=True):
            tests[arm] = _equivalence(apart[apart["arm"] == arm], margin, statistics)
            yield replace(effect, extra={**effect.extra, **tests[arm]})
        yield from _own_recoveries(str(regime), part, statistics)
        yield from _over_all_edits(str(regime), apart, tests, statistics)


def _equivalence(rows: pd.DataFrame, margin: float, statistics: StatisticsConfig) -> dict[str, float]:
    """Two one-sided tests on differences in units of the mean gap; nothing with fewer than two clusters."""
    clusters = rows[statistics.cluster]
    if clusters.nunique() < 2:
        return {}
    gap = float((rows["m_donor"] - rows["m_base"]).mean())
    test = equivalent(rows["apart"] / gap, margin, clusters=list(clusters))
    return {"equivalence_p": test.p_value, "equivalence_margin": margin, "equivalence_n": float(test.n)}


def _over_all_edits(
    regime: str, rows: pd.DataFrame, tests: dict[str, dict[str, float]], statistics: StatisticsConfig
) -> Iterator[Effect]:
    edits = rows[~rows["arm"].isin(_NO_EDITS)]
    for group, arms in edit_groups(list(edits["arm"].unique())).items():
        p_values = [tests[arm]["equivalence_p"] for arm in arms if tests[arm]]
        if p_values:
            yield maximum(f"{regime}.{group}.equivalence_p", p_values, unit="p")
        some = edits[edits["arm"].isin(arms)]
        yield maximum(f"{regime}.{group}.error", some["apart"].abs(), clusters=some[statistics.cluster])
    for notes, part in edits.groupby("notes_ahead"):
        yield ratio_of_sums(
            f"{regime}.ahead_{notes}.disagreement",
            part["apart"].abs(),
            part["m_donor"] - part["m_base"],
            clusters=part[statistics.cluster],
            statistics=statistics,
            noise_floor=float(part["noise_floor"].max()),
        )


def _own_recoveries(regime: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """The paper's estimator: each regime's own shift over its own gap, and the mean of ratios that it takes."""
    margins = rows.pivot_table(index="pair", columns="arm", values="margin")
    clusters = rows.groupby("pair")[statistics.cluster].first().loc[margins.index]
    gap = margins["recompile"] - margins[STALE]
    if not (gap != 0).all():
        return
    for arm in margins.columns.drop([STALE, "recompile"]):
        shift = margins[arm] - margins[STALE]
        yield mean_of_ratios(f"{regime}.{arm}.own_recovery", shift, gap, clusters=clusters, statistics=statistics)


def composing(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """How far skills were moved, and the tokens that composing ran as a share of a prefill."""
    reference = rows[rows["arm"] == REFERENCE].set_index("pair")["tokens"]
    stale = rows[(rows["arm"] == STALE) & (rows["regime"] != RECOMPUTED)]
    for regime, part in stale.groupby("regime", sort=False):
        shared: dict[str, Any] = {"clusters": part[statistics.cluster], "statistics": statistics}
        yield mean(f"{regime}.moved", part["moved"], unit="tokens", **shared)
        share = f"{regime}.compose.token_share"
        yield ratio_of_sums(share, part["compose_tokens"], reference.loc[part["pair"]], **shared)


def returning(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """Right decisions under the old value after ways there and back, and what these leave beside one edit."""
    for (regime, arm), part in rows.groupby(["regime", "arm"], sort=False):
        name = f"{regime}.{arm}"
        back = part[part["edit"] == "return"]
        for trip in range(1, int(back["trip"].max()) + 1):
            after = back[back["trip"] == trip]
            right = (after["margin"] < 0).astype(float)
            clusters = after[statistics.cluster]
            yield proportion(f"{name}.return_{trip}.correct_rate", right, clusters=clusters, statistics=statistics)
        last = back[back["trip"] == back["trip"].max()].set_index("pair")
        once = part[part["edit"] == "once"].set_index("pair")["margin"].loc[last.index]
        yield ratio_of_sums(
            f"{name}.return.residue",
            last["margin"] - once,
            last["m_donor"] - last["m_base"],
            clusters=last[statistics.cluster],
            statistics=statistics,
            noise_floor=float(last["noise_floor"].max()),
        )
