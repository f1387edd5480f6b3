"""What the rows of `heads` mean: recovery by sets of heads, what ablation leaves, rank correlations of single heads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from kvprobe.figures.bars import recovery_by
from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Curve, Doses
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS, levels
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.decoding import accuracy
from kvprobe.probes.kit.reading.differences import recovery_difference
from kvprobe.probes.kit.reading.patching import DECISION, conditions, decision_effects, over_draws
from kvprobe.probes.mechanism.heads.probe import Heads
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_READ = tuple(f"read_{how}" for how in ("in_sample", "held_out", "direct", "notes", "noising", "random", "matched"))
_WRITE = tuple(f"write_{how}" for how in ("held_out", "in_sample", "one", "random", "matched"))
_SETS = tuple(f"{name}_{{heads}}" for name in (*_READ, *_WRITE, "kv_in_sample", "kv_held_out"))
_ABLATIONS = tuple(f"ablate_{how}_{{heads}}" for how in ("held_out", "others", "matched"))
_CORRELATED = {
    "effect_attention": ("head", "attention"),
    "effect_attribution": ("head", "attribution"),
    "write_attribution": ("write_head", "attribution"),
}
_PAPER_SIZES = (1, 2, 3, 5, 8, 12)


def effects(sample: Sample, _: Heads) -> Iterator[Effect]:
    """Effects of sets, of other single heads and of ablations, rank correlations, noise.

    `X_k.recovery`, `.margin_shift` and `.flip_rate` of each set (mean over draws); `read_indirect_k.recovery`, what
    later heads add; `X_k.reach_rate`, the share of random sets that move the decision as far as the held-out set;
    `ablate_X_k.gap_retained` and `.accuracy`; rank correlations over the heads of a pair; `noise.margin`.
    """
    sets = sample.of(measurement="set")
    for condition, part in conditions(sets, *_SETS):
        yield from decision_effects(over_draws(part), condition)
        yield from _beside_held_out(sets, condition, part)
    yield from _others(sample)
    for condition, part in conditions(sample.of(measurement="ablation"), *_ABLATIONS):
        yield from _ablation(part, condition)
    for name, (kind, column) in _CORRELATED.items():
        yield from _correlation(sample.of(measurement=kind), f"{name}.rank_correlation", column)
    yield sample.noise()


def names(probe: Heads) -> Iterator[str]:
    """Those of `effects`."""
    sizes = {*probe.sizes, probe.control_size}
    yield from joined((*_sized(_SETS, sizes), "read_single_others"), DECISION)
    drawn = [name for name in _SETS if "random" in name or "matched" in name]
    yield from joined(_sized(drawn, sizes), "reach_rate")
    yield from joined(_sized(["read_indirect_{heads}"], sizes), "recovery")
    yield from joined(_sized(_ABLATIONS, sizes), ("gap_retained", "accuracy"))
    yield from joined(_CORRELATED, "rank_correlation")
    yield NOISE


def _sized(conditions: Sequence[str], sizes: Collection[int]) -> list[str]:
    return [condition.format(heads=size) for condition in conditions for size in sizes]


def _beside_held_out(sets: Sample, condition: str, part: Sample) -> Iterator[Effect]:
    """The direct effect of read heads, and random sets, compared with the held-out set of their kind and size."""
    kind, how = condition.split("_")[:2]
    own, best = (pattern.format(**part.parameters) for pattern in (condition, f"{kind}_held_out_{{heads}}"))
    both = sets.of(intervention=(own, best)).named(**part.parameters)
    if how == "direct":
        # What a set does through later heads: its whole effect less that with them frozen.
        yield from recovery_difference(both, "read_indirect_{heads}.recovery", best, own, by="intervention")
    elif how in ("random", "matched") and best in set(both.rows["intervention"]):
        of_best = both.rows[both.rows["intervention"] == best].set_index("pair")["margin"]
        drawn = both.where(both.rows["intervention"] == own)
        yield drawn.rate(f"{condition}.reach_rate", drawn.rows["margin"] >= drawn.rows["pair"].map(of_best))


def _others(sample: Sample) -> Iterator[Effect]:
    """Single read heads outside the largest held-out set."""
    held_out = sample.rows["intervention"].fillna("").str.startswith("read_held_out_")
    heads = sample.of(measurement="head")
    ranks = sorted(heads.rows["rank"].unique())
    largest = sample.rows.loc[held_out, "size"].max() if held_out.any() else min(ranks, default=0)
    if len(outside := heads.of(rank=[rank for rank in ranks if rank >= largest])):
        flipped = (outside.rows["margin"] > 0) != (outside.rows["m_base"] > 0)
        yield from decision_effects(
            over_draws(outside.table(outside.rows.assign(flipped=flipped))), "read_single_others"
        )


def _ablation(sample: Sample, condition: str) -> Iterator[Effect]:
    base, donor = sample.rows["margin_base_ablated"], sample.rows["margin_donor_ablated"]
    yield sample.ratio(f"{condition}.gap_retained", donor - base, sample.gap, noise_floor=2 * sample.floor)
    right = sample.table(sample.rows.assign(right_base=base < 0, right_donor=donor > 0))
    yield from accuracy(right, f"{condition}.accuracy")


def _correlation(sample: Sample, name: str, column: str) -> Iterator[Effect]:
    """Rank correlation of the heads' effect with a column in each pair, averaged over pairs (critique CI2)."""
    found = []
    for _pair, part in sample.by("pair"):
        shift, other = part.shift.to_numpy(float), part.rows[column].to_numpy(float)
        # Where all heads are equal there is no order to compare.
        if np.ptp(shift) > 0 and np.ptp(other) > 0:
            found.append((float(spearmanr(shift, other).statistic), part.clusters.iloc[0]))
    if found:
        pairs = sample.table(pd.DataFrame(found, columns=["correlation", sample.statistics.cluster]))
        yield pairs.mean(name, "correlation", "rank correlation")


@dataclass(frozen=True)
class _Alone:
    """Each head's effect alone against its attention to the notes; the three strongest by name."""

    ylabel: str = "recovery,\none head alone"
    height: float = 2.0

    def draw(self, axes: Axes, panel: Panel) -> None:
        heads = panel.rows[panel.rows["measurement"] == "head"]
        recovery = recovery_by(heads, "layer", "head")
        attention = heads.groupby(["layer", "head"])["attention"].mean()
        levels(axes, 0.0)
        axes.plot(attention, recovery, "o", ms=4, mew=0, alpha=0.7, color=COLORS["blue"])
        names = ", ".join(f"{int(layer)}.{int(head)}" for layer, head in recovery.nlargest(3).index)
        axes.text(0.04, 0.95, f"strongest (layer.head):\n{names}", transform=axes.transAxes, va="top", fontsize=7)
        axes.set_xlabel("attention to held-out notes")

    def handles(self, panels: Sequence[Panel]) -> list[Any]:  # noqa: ARG002
        return []


READING = Reading(
    effects,
    FigureSpec(
        "Which attention heads read the notes, and which write them?",
        (
            Doses(
                {
                    Curve("read_in_sample_{heads}"): ("ranked on the\npair itself", COLORS["sky"]),
                    Curve("read_held_out_{heads}"): ("ranked on\nother skeletons", COLORS["blue"]),
                    Curve("read_notes_{heads}", line="--"): ("these, reading\nthe notes alone", COLORS["green"]),
                    Curve("read_matched_{heads}"): ("others of the\nsame layers", COLORS["orange"]),
                },
                "recovery of\nthe new decision",
                2.3,
                "heads",
                ticks_of="read_held_out_{heads}",
            ),
            Doses(
                {
                    Curve("ablate_held_out_{heads}"): ("top read heads\nablated", COLORS["vermilion"]),
                    Curve("ablate_others_{heads}"): ("all but them\nablated", COLORS["purple"]),
                },
                "share of the\ngap retained",
                1.8,
                "heads",
                metric="gap_retained",
                ticks_of="ablate_held_out_{heads}",
            ),
            Doses(
                {
                    Curve("write_held_out_{heads}"): ("query heads,\nall positions", COLORS["vermilion"]),
                    Curve("write_one_{heads}"): ("query heads,\none position", COLORS["purple"]),
                    Curve("kv_held_out_{heads}", line="--"): ("key-value heads,\nall positions", COLORS["green"]),
                },
                "recovery of\nthe new decision",
                2.0,
                "heads",
                ticks_of="write_held_out_{heads}",
            ),
            _Alone(),
        ),
        main=DosesByModel(
            ("read_held_out_{heads}", "recovery"),
            ("read_matched_{heads}", "recovery"),
            "Read heads, held-out top k; x: matched k",
            "read heads",
        ),
        key_beside=("read heads", "mean of others", "written", ""),
        key_columns=2,
    ),
    paper={
        **{
            f"read_in_sample_{k}.recovery": PaperEntry("read_heads_joint", f"top_{k}_heads", "decision_recovery")
            for k in _PAPER_SIZES
        },
        **{
            f"write_one_{k}.recovery": PaperEntry(
                "write_heads_joint", f"top_{k}_heads_at_1_aggregator", "decision_recovery"
            )
            for k in _PAPER_SIZES
        },
        "read_single_others.recovery": PaperEntry("read_heads_control", "random_single_heads", "decision_recovery"),
    },
    names=names,
)
