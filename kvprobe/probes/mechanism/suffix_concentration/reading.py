"""What the rows of `suffix_concentration` mean: recoveries of sets, shares of single positions, and floors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Doses, doses_key
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.depth import THIRDS
from kvprobe.probes.kit.reading.differences import recovery_difference
from kvprobe.probes.kit.reading.patching import DECISION, conditions, decision_effects, identity_errors
from kvprobe.probes.mechanism.suffix_concentration.probe import PAPER_FRACTIONS, SuffixConcentration
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFICIENT = 0.8
"""A pair's suffix is sufficient from this recovery on (protocol 1.2)."""

_DOSES = {
    "suffix_{percent}": ("the last tokens", COLORS["blue"]),
    "prefix_{percent}": ("the first tokens", COLORS["orange"]),
}
_TOP = {
    "top_in_sample_{size}": ("top k, ranked on the pair itself", COLORS["sky"]),
    "top_held_out_{size}": ("top k, ranked on other skeletons", COLORS["blue"]),
    "matched_{size}": ("k at random, matched", COLORS["orange"]),
    "random_{size}": ("k at random", COLORS["grey"]),
}
_LAYERS = {
    "layer_{layer}": ("one layer", COLORS["vermilion"]),
    "up_to_layer_{layer}": ("all layers up to it", COLORS["green"]),
    "from_layer_{layer}": ("all layers from it on", COLORS["purple"]),
}
_SEGMENTS = ("field", "session_rest", "filler_before", "policy", "filler", "conversation", "task", "cue", "delimiter")
_IDENTITIES = {"suffix_100": "m_donor", "no_op": "m_base", "same_value": "m_base"}


def effects(sample: Sample, probe: SuffixConcentration) -> Iterator[Effect]:
    """Recovery of every set, shares by segment and kind of token, smallest sufficient suffix, floors."""
    singles = sample.of(intervention="position")
    others = [name for name in sample.rows["intervention"].unique() if name != "position"]
    sets = sample.of(intervention=others)
    for condition, part in conditions(sets, *_DOSES, *_TOP, *_LAYERS):
        yield from decision_effects(part, condition)
    size = probe.control_size
    for control in ("random", "matched"):
        yield from recovery_difference(
            sets.named(size=size),
            f"top_{{size}}_over_{control}.recovery",
            f"top_held_out_{size}",
            f"{control}_{size}",
            by="intervention",
        )
    layers = [name for name in others if name.startswith("layer_")]
    for third, part in sets.of(intervention=layers).by("depth"):
        yield part.recovery(f"single_layer_{third}.recovery")
    if len(singles):
        yield from position_shares(singles)
        yield from single_recoveries(singles)
    suffixes = [name for name in others if name.startswith("suffix_")]
    yield from smallest_suffix(sets.of(intervention=suffixes))
    yield from identity_errors(sets, _IDENTITIES)
    if len(sample):
        yield sample.maximum("noise.margin", "noise_floor")


def names(probe: SuffixConcentration) -> Iterator[str]:
    """Those of `effects`."""
    percents = [round(100 * fraction) for fraction in probe.fractions]
    sets = [condition.format(percent=percent) for condition in _DOSES for percent in percents]
    sets += [condition.format(size=size) for condition in _TOP for size in (*probe.sizes, probe.control_size)]
    bands = [f"{third}_layers" for third in THIRDS]
    # Layers are the model's, segments the prompt's.
    yield from joined((*sets, *_LAYERS, *bands, "segment_*", "no_op", "same_value"), DECISION)
    over = [f"top_{probe.control_size}_over_{control}" for control in ("random", "matched")]
    alone = [f"single_layer_{third}" for third in THIRDS]
    yield from joined((*over, *alone, "single_in_*", "sum_of_singles"), "recovery")
    yield from joined(("mass", "density"), "*")
    yield from joined(_IDENTITIES, "error")
    yield from ("delimiter.share", "delimiter.density", "sufficient_suffix.fraction", NOISE)


def position_shares(singles: Sample) -> Iterator[Effect]:
    """How the positive recovery of single positions is spread over segments and kinds of token (protocol 1.7).

    For each group X: `mass.X`, the share of a pair's positive recovery that lies in it, and `density.X`, that share
    over the group's share of tokens. Recovery within the noise floor counts as none; a pair without any is excluded.
    """
    rows = singles.rows
    toward = singles.gap.apply(lambda gap: 1.0 if gap > 0 else -1.0)
    gain = singles.shift * toward
    table = rows.assign(gain=gain.where(gain > rows["noise_floor"], 0.0), one=1.0)
    totals = table.groupby("pair")[["gain", "one"]].transform("sum")
    silent = int(table.loc[totals["gain"] == 0, "pair"].nunique())
    table = table[totals["gain"] > 0]
    if table.empty:
        return
    totals = totals.loc[table.index]
    table = table.assign(mass=table["gain"] / totals["gain"], tokens=table["one"] / totals["one"])
    pairs = singles.excluding(silent).table(table).per("pair")
    for name, inside in _groups(table).items():
        sums = table[inside].groupby("pair")[["mass", "tokens"]].sum()
        shares = pairs.table(pairs.rows.join(sums.reindex(pairs.rows.index, fill_value=0.0)))
        mass, density = share_names(name)
        yield shares.mean(mass, "mass")
        if shares.rows["tokens"].sum() > 0:
            yield shares.ratio(density, "mass", "tokens", "ratio")


def share_names(group: str) -> tuple[str, str]:
    """Names of the effects that hold a group's share of the recovery, and that share over its share of tokens."""
    if group == "delimiter":
        return "delimiter.share", "delimiter.density"
    return f"mass.{group}", f"density.{group}"


def _groups(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Which rows belong to each segment, to all that follows the rule, and to the delimiters."""
    groups = {str(name): table["segment"] == name for name in table["segment"].unique()}
    if "policy" in groups:
        last = table[groups["policy"]].groupby("pair")["position"].max()
        groups["after_policy"] = table["position"] > table["pair"].map(last).fillna(float("inf"))
    groups["delimiter"] = table["delimiter"].astype(bool)
    return groups


def single_recoveries(singles: Sample) -> Iterator[Effect]:
    """Mean recovery of one position by segment (`single_in_X`), and what all positions recover alone, added up."""
    for segment, part in singles.by("segment"):
        yield part.recovery(f"single_in_{segment}.recovery")
    moved = singles.table(singles.rows.assign(shift=singles.shift))
    pairs = moved.per("pair", shift="sum", m_base="first", m_donor="first")
    summed = pairs.with_floor(singles.floor * len(singles) / len(pairs))
    yield summed.recovery("sum_of_singles.recovery", "shift")


def smallest_suffix(suffixes: Sample) -> Iterator[Effect]:
    """`sufficient_suffix.fraction`: the smallest fraction of a pair from which on every suffix suffices."""
    if not len(suffixes):
        return
    table = suffixes.rows.assign(short=suffixes.shift / suffixes.gap < SUFFICIENT)
    fractions = sorted(table["fraction"].unique())
    following = dict(zip(fractions, [*fractions[1:], fractions[-1]], strict=True))
    pairs = suffixes.per("pair")
    too_short = table[table["short"]].groupby("pair")["fraction"].max().map(following)
    smallest = too_short.reindex(pairs.rows.index).fillna(fractions[0])
    yield pairs.median("sufficient_suffix.fraction", smallest)


@dataclass(frozen=True)
class SegmentShares:
    """A row of the figure: each segment's share of the positive recovery of single positions, and of the tokens."""

    ylabel: str = ""
    height: float = 2.5

    def draw(self, axes: Axes, panel: Panel) -> None:
        """A bar for each segment; a stroke for its share of tokens, a diamond for the paper's value."""
        shown = [name for name in _SEGMENTS if share_names(name)[0] in panel.effects]
        for place, name in enumerate(shown):
            mass, density = (panel.effects.get(effect) for effect in share_names(name))
            if mass is None:
                continue
            color = COLORS["vermilion"] if name == "delimiter" else COLORS["blue"]
            axes.barh(place, mass.estimate, 0.62, color=color, alpha=0.8, zorder=2)
            axes.plot([mass.low, mass.high], [place, place], color=COLORS["ink"], lw=1.2, zorder=3)
            if density is not None and density.estimate > 0:
                tokens = mass.estimate / density.estimate
                axes.plot(tokens, place, "|", ms=11, mew=1.8, color=COLORS["ink"], zorder=4)
            if mass.name in panel.paper:
                axes.plot(panel.paper[mass.name], place, "D", ms=5, mfc="white", mec=COLORS["ink"], mew=1.2, zorder=5)
        axes.set_yticks(range(len(shown)), [name.replace("_", " ") for name in shown])
        axes.tick_params(axis="y", labelleft=True, length=0)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of single-position recovery\n(stroke: share of tokens)")
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")

    def handles(self, panels: Sequence[Panel]) -> list[Any]:  # noqa: ARG002
        """None: the axis says what is drawn."""
        return []


_RECOVERY = "recovery of\nthe new decision"
_PARTS = (
    Doses(_DOSES, _RECOVERY, 2.0, "patched share of tokens (%)"),
    Doses(_TOP, _RECOVERY, 2.0, "patched positions k", marker="s", ticks_of="top_held_out_{size}"),
    Doses(_LAYERS, _RECOVERY, 2.0, "layer", marker="^", whole_ticks_of="layer_{layer}"),
)

READING = Reading(
    effects,
    FigureSpec(
        "Which cache entries carry a changed field's effect?",
        (*_PARTS, SegmentShares()),
        main=DosesByModel(
            ("suffix_{percent}", "recovery"),
            ("prefix_{percent}", "recovery"),
            "Last tokens; dashed: first tokens",
            "patched share of tokens (%)",
            log=False,
        ),
        key=doses_key(*_PARTS),
        key_columns=3,
    ),
    paper={
        **{
            f"suffix_{round(100 * f)}.recovery": PaperEntry(
                "suffix_dose_response", f"last_{f}_of_downstream", "decision_recovery"
            )
            for f in PAPER_FRACTIONS
        },
        **{
            f"prefix_{round(100 * f)}.recovery": PaperEntry(
                "prefix_dose_response", f"first_{f}_of_downstream", "decision_recovery"
            )
            for f in (0.1, 0.3, 0.5, 0.9)
        },
        **{
            f"top_in_sample_{k}.recovery": PaperEntry(
                "topk_positions", f"top_{k}_by_single_position_effect", "decision_recovery"
            )
            for k in (1, 8, 32, 128)
        },
        **{
            f"single_layer_{third}.recovery": PaperEntry(
                "layer_profile", f"{third}_third_single_layer_mean", "decision_recovery"
            )
            for third in ("early", "mid", "late")
        },
        "delimiter.share": PaperEntry("recovery_mass_by_token_type", "delimiter", "share_of_positive_recovery"),
        "mass.field": PaperEntry("recovery_mass_by_region", "field", "share_of_positive_recovery"),
    },
    finding="Of what single positions recover, the rule holds {mass.policy}, the text after it {mass.after_policy}, "
    "delimiters {delimiter.share}.",
    step=2,
    names=names,
)
