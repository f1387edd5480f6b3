"""What the rows of `attention_attribution` mean: attention mass by region, and whether attention tells what acts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from kvprobe.figures.bars import Bars
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.profiles import Profiles
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS, levels
from kvprobe.probes.base import Reading
from kvprobe.probes.mechanism.attention_attribution.probe import AttentionAttribution
from kvprobe.stats import NOISE, Effect, Sample, joined, maximum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MASSES = {
    "mass.sink": ("sink", COLORS["grey"]),
    "mass.field": ("field", COLORS["vermilion"]),
    "mass.policy": ("rule", COLORS["green"]),
    "mass.task": ("task", COLORS["purple"]),
    "mass.downstream": ("all after\nthe field", COLORS["blue"]),
}
_LINES = {
    "sink": ("sink", COLORS["grey"], "s"),
    "field": ("field", COLORS["vermilion"], "o"),
    "policy": ("rule", COLORS["green"], "^"),
    "task": ("task", COLORS["purple"], "v"),
    "self": ("itself", COLORS["orange"], "D"),
}
_KINDS = {"rule": COLORS["green"], "task": COLORS["purple"], "other": COLORS["sky"]}


def effects(sample: Sample, probe: AttentionAttribution) -> Iterator[Effect]:
    """Mass of each region on each cache, mass per token, correlation with causal effects, share of the top."""
    masses = sample.of(measurement="mass")
    for cache, part in masses.by("cache"):
        yield from mass_effects(part, "" if cache == "field_only" else f"{cache}.")
    yield from correlations(sample.of(measurement="position"), probe.top)
    if len(masses):
        total = masses.rows.groupby(["pair", "cache", "layer"])["mass"].sum()
        yield masses.made(maximum("mass.error", (total - 1).abs(), unit="attention mass"))
    if len(sample):
        yield sample.maximum("noise.margin", "noise_floor")


def names(probe: AttentionAttribution) -> Iterator[str]:
    """Those of `effects`."""
    # Regions are called by the prompt's segments.
    yield from joined(("mass", "density", "stale.mass", "new.mass"), "*")
    shares = f"top_{probe.top}_share", f"top_{probe.top}_over_chance"
    yield from joined(("transplanted", "hidden"), ("correlation", *shares))
    yield NOISE


def mass_effects(sample: Sample, prefix: str) -> Iterator[Effect]:
    """`mass.X` of each region X on one cache, and on the field-only cache, whose prefix is empty, `density.X`.

    A density is the mass of a region over what its share of all tokens would give it.
    """
    rows = sample.rows
    pairs, layers = sample.per("pair", tokens="sum"), rows["layer"].nunique()
    for region, inside in _regions(rows).items():
        sums = rows[inside].groupby("pair")[["mass", "tokens"]].sum().reindex(pairs.rows.index, fill_value=0.0)
        mass = sums["mass"] / layers
        yield pairs.mean(f"{prefix}mass.{region}", mass, "attention mass")
        if not prefix:
            yield pairs.ratio(f"density.{region}", mass, sums["tokens"] / pairs.rows["tokens"], "ratio")


def _regions(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Which rows belong to each region, and to everything after the field."""
    regions = {str(region): rows["region"] == region for region in rows["region"].unique()}
    return {**regions, "downstream": rows["downstream"].astype(bool)}


def correlations(positions: Sample, top: int) -> Iterator[Effect]:
    """Spearman correlation of attention with each causal effect within a pair, and what the most attended carry."""
    for name in ("transplanted", "hidden"):
        effect = (positions.rows[f"margin_{name}"] - positions.rows["m_base"]) / positions.gap
        # A patch ought to move the decision to the donor; hiding a stale note may move it either way.
        table = positions.rows.assign(effect=effect if name == "transplanted" else effect.abs())
        found = {pair: of_pair(part, top) for pair, part in table.groupby("pair")}
        values = pd.DataFrame.from_dict(found, orient="index", columns=["correlation", "share", "chance"]).dropna()
        if values.empty:
            continue
        pairs = positions.excluding(len(found) - len(values)).per("pair")
        pairs = pairs.table(pairs.rows.join(values, how="right"))
        yield pairs.mean(f"{name}.correlation", "correlation", "Spearman rho")
        yield pairs.mean(f"{name}.top_{top}_share", "share")
        yield pairs.mean(f"{name}.top_{top}_over_chance", pairs.rows["share"] - pairs.rows["chance"])


def of_pair(rows: pd.DataFrame, top: int) -> tuple[float, float, float]:
    """Correlation, share of all positive effect at the most attended positions, and the share expected by chance."""
    positive = rows["effect"].clip(lower=0)
    if rows["attention"].nunique() < 2 or rows["effect"].nunique() < 2 or not positive.sum():
        return float("nan"), float("nan"), float("nan")
    correlation = float(stats.spearmanr(rows["attention"], rows["effect"]).statistic)
    most = rows["attention"].nlargest(top).index
    return correlation, float(positive.loc[most].sum() / positive.sum()), min(top, len(rows)) / len(rows)


def mass_dots(panel: Panel, effect: Effect) -> pd.Series:
    """Each skeleton's attention mass in the region that an effect is about, its metric."""
    rows = panel.rows_of(effect)
    inside = rows[_regions(rows)[effect.metric]]
    sums = inside.groupby(["skeleton", "pair"])["mass"].sum() / rows["layer"].nunique()
    return sums.groupby("skeleton").mean()


def mass_by_layer(panel: Panel) -> Mapping[str, tuple[pd.Series, str, str]]:
    """Mean mass over layers on the field-only cache, a line for each region."""
    means = panel.rows[panel.rows["cache"] == "field_only"].groupby(["region", "layer"])["mass"].mean()
    known = set(means.index.get_level_values("region"))
    return {
        label: (means[region], color, marker) for region, (label, color, marker) in _LINES.items() if region in known
    }


@dataclass(frozen=True)
class Causes:
    """A row of the figure: the recovery of every position patched alone over the attention paid to it."""

    ylabel: str = "recovery when\npatched alone"
    height: float = 2.2

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the positions of one model."""
        rows = panel.rows[panel.rows["measurement"] == "position"]
        recovery = (rows["margin_transplanted"] - rows["m_base"]) / (rows["m_donor"] - rows["m_base"])
        kind = rows["segment"].where(rows["segment"].isin(["policy", "task"]), "other").replace("policy", "rule")
        levels(axes, 0.0)
        for name, color in _KINDS.items():
            part = kind == name
            attention = np.maximum(rows.loc[part, "attention"], 1e-6)
            axes.plot(attention, recovery[part].clip(-0.5, 1.5), "o", ms=2.5, mew=0, alpha=0.35, color=color)
        axes.set_xscale("log")
        axes.set_xlabel("attention paid to one position")
        if correlation := panel.effects.get("transplanted.correlation"):
            text = f"rank correlation {correlation.estimate:.2f}\n[{correlation.low:.2f}, {correlation.high:.2f}]"
            axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=7.5)

    def handles(self, panels: Sequence[Panel]) -> list[Any]:  # noqa: ARG002
        """The dots of positions that are in no region of the other rows."""
        from matplotlib.lines import Line2D

        return [Line2D([], [], marker="o", ls="", ms=4, mew=0, color=_KINDS["other"], label="other position")]


READING = Reading(
    effects,
    FigureSpec(
        "Where does the decision look, and does it act from there?",
        (
            Bars(_MASSES, "attention mass of\nthe decision token", 2.2, levels=(), dots=mass_dots),
            Profiles(mass_by_layer, "attention mass", 1.9),
            Causes(),
        ),
        main=EffectsByModel(
            {name: label for name, (label, _) in _MASSES.items()},
            "Where the decision token looks",
            ylabel="attention mass",
            levels=(),
        ),
        key_columns=5,
    ),
    paper={
        f"mass.{region}": PaperEntry("attention_attribution", condition, "decision_token_attention_mass")
        for region, condition in (("sink", "sink_0_3"), ("field", "field"), ("downstream", "orig_downstream"))
    },
    names=names,
)
