"""Effects of the SAE probe, from its rows."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from kvprobe.probes.kit.measures import decision_effects
from kvprobe.probes.mechanism.sae.features import placements
from kvprobe.stats import Effect, StatisticsConfig, bootstrapped, maximum, mean, ratio_of_sums

# A rank correlation over many features is dear to resample.
_RESAMPLES = 999


def sae_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """All effects of one model; `rows` are those of the probe, with the cluster column."""
    by_measurement = dict(iter(rows.groupby("measurement", sort=False)))
    decisions = by_measurement["decision"]
    return [
        *_reconstruction_effects(by_measurement["reconstruction"], statistics),
        *_decoding_effects(by_measurement["decoding"], statistics),
        *_intervention_effects(decisions, statistics),
        # The few pairs on which single features are clamped may all have failed the gate.
        *(_cause_effects(by_measurement["feature"], statistics) if "feature" in by_measurement else ()),
        maximum("noise.margin", decisions["noise_floor"], clusters=decisions[statistics.cluster]),
    ]


def _reconstruction_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """Fraction of variance unexplained (FVU), and the share of the decision's loss that the SAE keeps away."""
    clusters = rows[statistics.cluster]

    def ratio(name: str, top: pd.Series, bottom: pd.Series) -> Effect:
        return ratio_of_sums(name, top, bottom, clusters=clusters, statistics=statistics)

    return [
        ratio("fvu.held_out", rows["squared_error"], rows["variance"]),
        ratio("fvu.places", rows["squared_error_places"], rows["variance_places"]),
        maximum("fvu.training", rows["fvu_training"], clusters=clusters, unit="fraction"),
        ratio(
            "loss_recovered.decision",
            rows["loss_ablated"] - rows["loss_spliced"],
            rows["loss_ablated"] - rows["loss_clean"],
        ),
    ]


def _decoding_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """AUC of the best feature where it was chosen and where it was not, and what choosing alone would give."""
    effects = []
    for name, part in rows.groupby("selection", sort=False):
        # Each fold has a feature of its own, so only prompts of one fold are compared with each other.
        by_fold = [
            pd.Series(placements(fold["activation"].to_numpy(float), fold["conclusion"].to_numpy(bool)), fold.index)
            for _, fold in part.groupby("fold")
        ]
        placed = pd.concat(by_fold).loc[part.index]
        clusters = part[statistics.cluster]
        effects.append(mean(f"best_feature_auc.{name}", placed, clusters=clusters, statistics=statistics))
    chosen, everything = (rows[rows["selection"] == name] for name in ("held_out", "in_sample"))
    for name, part, column, unit in (
        ("selection.p_value", chosen, "p_value", "p"),
        ("selection.null_auc", chosen, "null_auc", "fraction"),
        ("active_features.count", everything, "active_features", "features"),
        ("strong_features.count", everything, "strong_features", "features"),
    ):
        effects.append(maximum(name, part[column].astype(float), clusters=part[statistics.cluster], unit=unit))
    return effects


def _intervention_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    floor = float(rows["noise_floor"].max())
    effects = []
    for name, part in rows.groupby("intervention", sort=False):
        if str(name).startswith("necessity_"):
            drop, gap = part["m_donor"] - part["margin"], part["m_donor"] - part["m_base"]
            clusters = part[statistics.cluster]
            effects.append(
                ratio_of_sums(f"{name}.drop", drop, gap, clusters=clusters, statistics=statistics, noise_floor=floor)
            )
        else:
            effects += decision_effects(part, statistics, floor)
    same = rows[rows["intervention"] == "self_clamp"]
    error = (same["margin"] - same["m_base"]).abs()
    effects.append(maximum("self_clamp.error", error, clusters=same[statistics.cluster]))
    return effects + _comparisons(rows, statistics, floor)


def _comparisons(rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """`lead_k`: held-out features beyond their matched controls; `share_of_full`: beside the whole residual stream."""
    # Draws of a control are averaged within their pair, which every row of the table is.
    margins = rows.pivot_table(index="pair", columns="intervention", values="margin", aggfunc="mean")
    pairs = rows.groupby("pair").first().loc[margins.index]
    gap, clusters = pairs["m_donor"] - pairs["m_base"], pairs[statistics.cluster]
    full = margins["full"] - pairs["m_base"]
    effects = []
    for size in [int(found[1]) for found in map(re.compile(r"held_out_(\d+)").fullmatch, map(str, margins)) if found]:
        chosen, control = margins[f"held_out_{size}"], margins[f"matched_{size}"]
        ratios = [(f"lead_{size}.recovery", chosen - control, gap)]
        # Where the whole stream moves nothing, there is nothing to share.
        if abs(full.mean()) > floor:
            ratios.append((f"held_out_{size}.share_of_full", chosen - pairs["m_base"], full))
        effects += [
            ratio_of_sums(name, shift, whole, clusters=clusters, statistics=statistics, noise_floor=floor)
            for name, shift, whole in ratios
        ]
    return effects


def _cause_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """Does what tells the conclusion better also move the decision more?

    `best_decoder` is the unit with the AUC furthest from one half, `best_cause` the one whose clamp alone recovers
    most; both are looked up in the table and so describe these pairs only, as does every AUC here.
    """
    table = decoding_and_cause(rows)
    distance = (table["auc"] - 0.5).abs().to_numpy()
    shifts = rows.assign(shift=rows["margin"] - rows["m_base"])
    by_pair = shifts.pivot(index="pair", columns=["place", "feature"], values="shift")[list(table.index)]
    clusters = rows.groupby("pair")[statistics.cluster].first().loc[by_pair.index]
    few = statistics.model_copy(update={"resamples": min(_RESAMPLES, statistics.resamples)})

    def correlation(part: pd.DataFrame) -> float:
        return float(spearmanr(distance, part.to_numpy().mean(axis=0)).statistic)

    decoder, cause = (table.index[int(np.argmax(values))] for values in (distance, table["recovery"]))
    clamped = rows[(rows["place"] == decoder[0]) & (rows["feature"] == decoder[1])]
    shift, gap = clamped["margin"] - clamped["m_base"], clamped["m_donor"] - clamped["m_base"]
    of_clamped = {"clusters": clamped[statistics.cluster], "statistics": statistics}
    effects = [
        ratio_of_sums("best_decoder.recovery", shift, gap, **of_clamped),
        maximum("best_decoder.auc", [0.5 + abs(table.loc[decoder, "auc"] - 0.5)], unit="fraction"),
        maximum("best_cause.auc", [0.5 + abs(table.loc[cause, "auc"] - 0.5)], unit="fraction"),
    ]
    # Where no feature moves the decision at all, causes have no ranks.
    if np.ptp(distance) and np.ptp(by_pair.to_numpy().mean(axis=0)):
        against = "decoding_against_cause.rank_correlation"
        effects.append(bootstrapped(against, by_pair, correlation, clusters=clusters, statistics=few))
    return effects


def decoding_and_cause(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of decoding against cause: by `place` and `feature`, the `auc` for the conclusion and the `recovery`.

    `rows` are those of single features, each clamped alone to its mean under the donor's conclusion.
    """
    sums = rows.assign(shift=rows["margin"] - rows["m_base"], gap=rows["m_donor"] - rows["m_base"])
    units = sums.groupby(["place", "feature"]).agg(auc=("auc", "first"), shift=("shift", "sum"), gap=("gap", "sum"))
    return pd.DataFrame({"auc": units["auc"], "recovery": units["shift"] / units["gap"]})
