"""Attention attribution (protocol 1.3): where does the decision look, and does it act from there?

The last token is run on the field-only cache (new field, everything else stale), and for comparison on the stale and
on the new one. A region's attention mass is the attention that the decision token pays to its positions, the mean over
heads, layer by layer.

    sink         the first three positions, whatever they hold
    before       from there to the field
    field        the field's value
    X            a segment after the field, by its name; all of them together are `downstream`
    self         the decision token itself

Attention says where information could come from, not whether it is used. So each position from the field on is also
acted on alone: transplanted from the donor's cache into the stale one, and hidden from the decision token on it. The
rank correlation of attention with both effects is taken within each pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
from pydantic import Field
from scipy import stats
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.decision_attention import decision_attention
from kvprobe.engine.interventions import AttentionKnockout, KVPatch
from kvprobe.engine.operations import overwrite
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, maximum, mean, ratio_of_sums
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

SINK = 3
"""Positions that count as the attention sink."""
_OUTSIDE = ("sink", "before", "self")


@PROBES.register("attention_attribution")
class AttentionAttribution(Probe):
    """Where the decision token looks, and whether what it looks at acts on the decision."""

    name: ClassVar[str] = "attention_attribution"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"mass.{region}": PaperEntry("attention_attribution", condition, "decision_token_attention_mass")
        for region, condition in (("sink", "sink_0_3"), ("field", "field"), ("downstream", "orig_downstream"))
    }

    class Parameters(base.Parameters):
        """How many positions count as the most attended ones."""

        top: int = Field(8, ge=1, description="most attended positions whose share of all effect is reported")
        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair a row for each cache, region and layer, and one for each position from the field on."""
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            unedited = prefill_pair(subject, pair)
            field_only, _ = overwrite(unedited.stale, pair.field, unedited.oracle)
            caches = {"field_only": field_only, "stale": unedited.stale, "new": unedited.oracle}
            attention = {name: _attention(subject, pair, name, cache) for name, cache in caches.items()}
            found = [row for name in caches for row in _masses(pair, name, attention[name])]
            found += self._positions(subject, pair, unedited, attention["field_only"])
            rows += [{"pair": index, **unedited.common(), **row} for row in found]
            progress(index + 1, len(pairs))
        return rows

    def _positions(self, subject: Subject, pair: Pair, unedited: PrefilledPair, attention: Tensor) -> list[Measurement]:
        span = range(pair.field.start, pair.decision_position)
        # A position that no sliding window connects with the field, or with the decision, changes nothing.
        patches = [KVPatch((position,), unedited.oracle, no_op=True) for position in span]
        hidden = [AttentionKnockout((pair.decision_position,), (position,), no_op=True) for position in span]
        margins = patched_margins(
            subject, pair, pair.base, unedited.stale, [*patches, *hidden], batch_size=self.parameters.batch_size
        )
        return [
            {
                "measurement": "position",
                "position": position,
                "segment": pair.base.segment_of(position),
                "attention": float(attention[..., position].mean()),
                "margin_transplanted": transplanted,
                "margin_hidden": masked,
            }
            for position, transplanted, masked in zip(span, margins[: len(span)], margins[len(span) :], strict=True)
        ]

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Mass of each region on each cache, mass per token, correlation with causal effects, share of the top."""
        masses, positions = (rows[rows["measurement"] == kind] for kind in ("mass", "position"))
        effects = _mass_effects(masses, statistics)
        effects += _correlations(positions, statistics, self.parameters.top)
        total = masses.groupby(["pair", "cache", "layer"])["mass"].sum()
        effects.append(maximum("mass.error", (total - 1).abs(), unit="attention mass"))
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Mass by region and by layer, and attention against causal effect; one column for each model."""
        from kvprobe.probes.mechanism.attention_attribution.figure import draw_attention_attribution

        return draw_attention_attribution(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Attention mass by region, of all models."""
        from kvprobe.probes.mechanism.attention_attribution.figure import attention_attribution_panel

        attention_attribution_panel(axes, panels)


def regions(pair: Pair) -> dict[str, list[int]]:
    """Positions of each region, in the order of the prompt; every position is in exactly one."""
    found: dict[str, list[int]] = {"sink": [], "before": []}
    for position in range(pair.decision_position):
        if position < SINK:
            name = "sink"
        elif position < pair.field.start:
            name = "before"
        else:
            name = pair.base.segment_of(position)
        found.setdefault(name, []).append(position)
    found["self"] = [pair.decision_position]
    return {name: positions for name, positions in found.items() if positions}


def _attention(subject: Subject, pair: Pair, name: str, cache: KVCache) -> Tensor:
    return decision_attention(subject, (pair.donor if name == "new" else pair.base).token_ids, cache)


def _masses(pair: Pair, cache: str, attention: Tensor) -> list[Measurement]:
    """Rows of one cache from `attention` `[layer, head, key]`."""
    by_layer = attention.double().mean(dim=1)
    return [
        {
            "measurement": "mass",
            "cache": cache,
            "region": region,
            "downstream": region not in (*_OUTSIDE, "field"),
            "layer": layer,
            "tokens": len(positions),
            "mass": float(by_layer[layer, positions].sum()),
        }
        for region, positions in regions(pair).items()
        for layer in range(len(by_layer))
    ]


def _mass_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    """`mass.X` and `density.X` on the field-only cache, `stale.mass.X` and `new.mass.X` on the others.

    A density is the mass of a region over what its share of all tokens would give it.
    """
    effects: list[Effect] = []
    for cache, part in rows.groupby("cache", sort=False):
        pairs = part.groupby("pair")
        clusters, layers = pairs[statistics.cluster].first(), part["layer"].nunique()
        length = part[part["layer"] == 0].groupby("pair")["tokens"].sum()
        prefix = "" if cache == "field_only" else f"{cache}."
        groups = {str(region): part["region"] == region for region in part["region"].unique()}
        groups["downstream"] = part["downstream"].astype(bool)
        for region, inside in groups.items():
            sums = part[inside].groupby("pair")[["mass", "tokens"]].sum().reindex(clusters.index, fill_value=0.0)
            mass, share = sums["mass"] / layers, sums["tokens"] / layers / length
            effects.append(
                mean(f"{prefix}mass.{region}", mass, clusters=clusters, statistics=statistics, unit="attention mass")
            )
            if not prefix:
                effects.append(
                    ratio_of_sums(
                        f"density.{region}", mass, share, clusters=clusters, statistics=statistics, unit="ratio"
                    )
                )
    return effects


def _correlations(rows: pd.DataFrame, statistics: StatisticsConfig, top: int) -> list[Effect]:
    """Spearman correlation of attention with each causal effect within a pair, and what the most attended carry."""
    effects = []
    gap = rows["m_donor"] - rows["m_base"]
    for name in ("transplanted", "hidden"):
        # A transplant ought to move the decision to the donor; hiding a stale note may move it either way.
        effect = (rows[f"margin_{name}"] - rows["m_base"]) / gap
        table = rows.assign(effect=effect if name == "transplanted" else effect.abs())
        found = {pair: _of_pair(part, top) for pair, part in table.groupby("pair")}
        values = pd.DataFrame.from_dict(found, orient="index", columns=["correlation", "share", "chance"]).dropna()
        excluded = len(found) - len(values)
        if values.empty:
            continue
        clusters = rows.groupby("pair")[statistics.cluster].first().loc[values.index]
        for column, label in (("correlation", "correlation"), ("share", f"top_{top}_share")):
            effects.append(
                mean(
                    f"{name}.{label}",
                    values[column],
                    clusters=clusters,
                    statistics=statistics,
                    excluded=excluded,
                    unit="Spearman rho" if column == "correlation" else "fraction",
                )
            )
        over = values["share"] - values["chance"]
        label = f"{name}.top_{top}_over_chance"
        effects.append(mean(label, over, clusters=clusters, statistics=statistics, excluded=excluded))
    return effects


def _of_pair(rows: pd.DataFrame, top: int) -> tuple[float, float, float]:
    """Correlation, share of all positive effect at the most attended positions, and the share expected by chance."""
    positive = rows["effect"].clip(lower=0)
    if rows["attention"].nunique() < 2 or rows["effect"].nunique() < 2 or not positive.sum():
        return float("nan"), float("nan"), float("nan")
    correlation = float(stats.spearmanr(rows["attention"], rows["effect"]).statistic)
    most = rows["attention"].nlargest(top).index
    return correlation, float(positive.loc[most].sum() / positive.sum()), min(top, len(rows)) / len(rows)
