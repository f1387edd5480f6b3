"""What the rows of `sae` mean: reconstruction, decoding, recovery by number of features, decoding against cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Doses
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS, levels
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.differences import recovery_difference
from kvprobe.probes.kit.reading.patching import DECISION, conditions, decision_effects, identity_errors
from kvprobe.probes.mechanism.sae.features import placements
from kvprobe.probes.mechanism.sae.probe import SparseAutoencoder
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A rank correlation over many features is expensive to resample.
_RESAMPLES = 999
_LAYER = "L14"
_CURVES = {
    "in_sample_{size}": ("chosen on the same skeletons", COLORS["sky"]),
    "held_out_{size}": ("chosen on other skeletons", COLORS["blue"]),
    "matched_{size}": ("matched active features", COLORS["orange"]),
}
_CEILINGS = {
    "full.recovery": ("whole residual stream", COLORS["ink"], ":"),
    "features.recovery": ("all features", COLORS["green"], "-."),
    "error_term.recovery": ("error term alone", COLORS["purple"], "--"),
}
_PLACE_MARKERS = ("o", "^", "s", "v")


def effects(sample: Sample, probe: SparseAutoencoder) -> Iterator[Effect]:
    """Reconstruction, decoding in and out of sample, recovery by size with its controls, decoding against cause."""
    yield from _reconstruction(sample.of(measurement="reconstruction"))
    yield from _decoding(sample.of(measurement="decoding"))
    decisions = sample.of(measurement="decision")
    decisions = decisions.with_floor(float(decisions.rows["noise_floor"].max()))
    yield from _interventions(decisions, probe.sizes)
    yield from _cause(sample.of(measurement="feature"))
    if len(decisions):
        yield decisions.maximum("noise.margin", "noise_floor")


def names(probe: SparseAutoencoder) -> Iterator[str]:
    """Those of `effects`."""
    sized = [condition.format(size=size) for condition in (*_CURVES, "dictionary_{size}") for size in probe.sizes]
    yield from joined((*sized, "full", "features", "error_term", "self_clamp"), DECISION)
    for size in probe.sizes:
        yield from (f"necessity_{size}.drop", f"lead_{size}.recovery", f"held_out_{size}.share_of_full")
    yield from joined("fvu", ("held_out", "places", "training"))
    yield from joined("best_feature_auc", ("held_out", "in_sample"))
    yield from joined("selection", ("p_value", "null_auc"))
    yield from joined(("active_features", "strong_features"), "count")
    yield from joined(("best_decoder", "best_cause"), "auc")
    yield from ("loss_recovered.decision", "self_clamp.error", "best_decoder.recovery")
    yield from ("decoding_against_cause.rank_correlation", NOISE)


def _reconstruction(sample: Sample) -> Iterator[Effect]:
    """Fraction of variance unexplained (FVU), and the share of the decision's loss that the SAE keeps away."""
    if not len(sample):
        return
    rows = sample.rows
    yield sample.ratio("fvu.held_out", "squared_error", "variance")
    yield sample.ratio("fvu.places", "squared_error_places", "variance_places")
    yield sample.maximum("fvu.training", "fvu_training", "fraction")
    kept_away = rows["loss_ablated"] - rows["loss_spliced"]
    yield sample.ratio("loss_recovered.decision", kept_away, rows["loss_ablated"] - rows["loss_clean"])


def _decoding(sample: Sample) -> Iterator[Effect]:
    """AUC of the best feature where it was chosen and where it was not, and what choosing alone would give."""
    for selection, part in sample.by("selection"):
        # Each fold has a feature of its own, so only prompts of one fold are compared with each other.
        by_fold = [
            pd.Series(placements(fold["activation"].to_numpy(float), fold["conclusion"].to_numpy(bool)), fold.index)
            for _, fold in part.rows.groupby("fold")
        ]
        yield part.mean(f"best_feature_auc.{selection}", pd.concat(by_fold).loc[part.rows.index])
    if len(chosen := sample.of(selection="held_out")):
        yield chosen.maximum("selection.p_value", chosen.rows["p_value"].astype(float), "p")
        yield chosen.maximum("selection.null_auc", chosen.rows["null_auc"].astype(float), "fraction")
    if len(everything := sample.of(selection="in_sample")):
        for kind in ("active_features", "strong_features"):
            yield everything.maximum(f"{kind}.count", everything.rows[kind].astype(float), "features")


def _interventions(decisions: Sample, sizes: Sequence[int]) -> Iterator[Effect]:
    """Effects of every clamp; `lead_k`, held-out features beyond their matched controls; `share_of_full`."""
    numbered = *_CURVES, "dictionary_{size}", "necessity_{size}"
    for condition, part in conditions(decisions, *numbered):
        if condition == "necessity_{size}":
            drop = part.rows["m_donor"] - part.rows["margin"]
            yield part.ratio(f"{condition}.drop", drop, part.gap, noise_floor=part.floor)
        else:
            yield from decision_effects(part, condition)
    yield from identity_errors(decisions, {"self_clamp": "m_base"})
    for size in sizes:
        held_out, matched = f"held_out_{size}", f"matched_{size}"
        lead = partial(recovery_difference, decisions.named(size=size), "lead_{size}.recovery", by="intervention")
        yield from lead(held_out, matched)
        yield from _share_of_full(decisions.of(intervention=(held_out, "full")).named(size=size), held_out)


def _share_of_full(both: Sample, chosen: str) -> Iterator[Effect]:
    """What the chosen features move beside what the whole residual stream moves, where it moves anything."""
    margins = both.rows.pivot(index="pair", columns="intervention", values="margin")
    if not {chosen, "full"} <= set(margins):
        return
    pairs = both.per("pair", m_base="first")
    base = pairs.rows["m_base"]
    shift, full = (margins[name].loc[base.index] - base for name in (chosen, "full"))
    if abs(full.mean()) > both.floor:
        yield pairs.ratio("held_out_{size}.share_of_full", shift, full, noise_floor=both.floor)


def _cause(features: Sample) -> Iterator[Effect]:
    """Does what tells the conclusion better also move the decision more?

    `best_decoder` is the unit with the AUC furthest from one half, `best_cause` the one whose clamp alone recovers
    most; both are looked up in the table and so describe these pairs only, as does every AUC here.
    """
    # The few pairs on which single features are clamped may all have failed the gate.
    if not len(features):
        return
    table = decoding_and_cause(features.rows)
    distance = (table["auc"] - 0.5).abs().to_numpy()
    shifts = features.rows.assign(shift=features.shift)
    by_pair = shifts.pivot(index="pair", columns=["place", "feature"], values="shift")[list(table.index)]
    decoder, cause = (table.index[int(np.argmax(values))] for values in (distance, table["recovery"]))
    rows = features.rows
    clamped = features.where((rows["place"] == decoder[0]) & (rows["feature"] == decoder[1])).with_floor(0.0)
    yield clamped.recovery("best_decoder.recovery")
    for name, unit in (("best_decoder", decoder), ("best_cause", cause)):
        one = pd.DataFrame({"auc": [0.5 + abs(table.loc[unit, "auc"] - 0.5)], features.statistics.cluster: ["all"]})
        yield features.table(one).maximum(f"{name}.auc", "auc", "fraction")
    # Where no feature moves the decision at all, causes have no ranks.
    if np.ptp(distance) and np.ptp(by_pair.to_numpy().mean(axis=0)):
        pairs = features.per("pair")

        def correlation(part: pd.DataFrame) -> float:
            return float(spearmanr(distance, by_pair.loc[part.index].to_numpy().mean(axis=0)).statistic)

        few = pairs.resampled(_RESAMPLES)
        yield few.bootstrap("decoding_against_cause.rank_correlation", correlation)


def decoding_and_cause(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of decoding against cause: by `place` and `feature`, the `auc` for the conclusion and the `recovery`.

    `rows` are those of single features, each clamped alone to its mean under the donor's conclusion.
    """
    sums = rows.assign(shift=rows["margin"] - rows["m_base"], gap=rows["m_donor"] - rows["m_base"])
    units = sums.groupby(["place", "feature"]).agg(auc=("auc", "first"), shift=("shift", "sum"), gap=("gap", "sum"))
    return pd.DataFrame({"auc": units["auc"], "recovery": units["shift"] / units["gap"]})


@dataclass(frozen=True)
class DecodingAgainstCause:
    """A row of the figure: every feature's AUC against what its clamp alone recovers."""

    ylabel: str = "recovery by the\nfeature's clamp alone"
    height: float = 2.3

    def draw(self, axes: Axes, panel: Panel) -> None:
        """A point for each feature, its marker telling the place."""
        for _, units in self._table(panel).groupby("place"):
            marker = _PLACE_MARKERS[int(units["place"].iloc[0]) % len(_PLACE_MARKERS)]
            axes.plot(units["auc"], units["recovery"], marker, ls="", ms=4, mew=0, color=COLORS["blue"], alpha=0.6)
        levels(axes, 0.0)
        axes.axvline(0.5, color=COLORS["ink"], lw=0.8, ls=(0, (4, 3)), zorder=1)
        axes.set_xlim(-0.03, 1.03)
        axes.set_xlabel("AUC of the feature for the conclusion")

    def handles(self, panels: Sequence[Panel]) -> list[Any]:
        """A marker for each place."""
        from matplotlib.lines import Line2D

        places = sorted({int(place) for panel in panels if panel.effects for place in self._table(panel)["place"]})
        look: dict[str, Any] = {"ls": "", "ms": 4, "color": COLORS["blue"]}
        return [
            Line2D([], [], marker=_PLACE_MARKERS[place % len(_PLACE_MARKERS)], label=f"at note {place + 1}", **look)
            for place in places
        ]

    def _table(self, panel: Panel) -> pd.DataFrame:
        return decoding_and_cause(panel.rows[panel.rows["measurement"] == "feature"]).reset_index()


READING = Reading(
    effects,
    FigureSpec(
        "Do a few features of a sparse autoencoder carry the conclusion?",
        (
            Doses(
                _CURVES,
                "recovery of the new decision",
                2.7,
                "clamped features",
                ceilings=_CEILINGS,
                ticks_of="held_out_{size}",
            ),
            DecodingAgainstCause(),
        ),
        main=DosesByModel(
            ("held_out_{size}", "recovery"),
            ("matched_{size}", "recovery"),
            "SAE features; dashed: matched active",
            "clamped features",
        ),
        key_columns=3,
    ),
    paper={
        "best_feature_auc.in_sample": PaperEntry("sae", _LAYER, "best_single_feature_auc"),
        "active_features.count": PaperEntry("sae", _LAYER, "active_features_at_aggregator"),
        "strong_features.count": PaperEntry("sae", _LAYER, "features_with_auc_gap_over_0.45"),
        "fvu.training": PaperEntry("sae", _LAYER, "FVU"),
        **{
            f"{ours}_{k}.{metric}": PaperEntry("sae", f"{_LAYER}/{theirs}_{k}", f"decision_{metric}")
            for ours, theirs, metric in (
                ("held_out", "clamp_top", "recovery"),
                ("dictionary", "clamp_random", "recovery"),
                ("necessity", "ablate_top", "drop"),
            )
            for k in (1, 3, 10, 30)
        },
    },
    names=names,
)
