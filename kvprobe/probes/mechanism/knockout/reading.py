"""What the rows of `knockout` mean: shifts and flips by cache, and differences between caches and between key sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from kvprobe.figures.bars import Bars
from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Curve, Doses, doses_key
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.differences import recovery_difference
from kvprobe.probes.kit.reading.patching import conditions
from kvprobe.probes.mechanism.knockout.probe import FRACTIONS, Knockout
from kvprobe.stats import NOISE, Effect, Sample, joined

_KEYS = {
    "attention_{percent}": ("most attended hidden", COLORS["vermilion"]),
    "effect_{percent}": ("most effect, other skeletons", COLORS["blue"]),
    "equal_mass_{percent}": ("as much attention, random", COLORS["green"]),
    "random_{percent}": ("as many, random", COLORS["grey"]),
    "low_effect_{percent}": ("least effect", COLORS["sky"]),
}
_NUMBERED = (*_KEYS, "effect_{percent}_in_sample")
_CACHES = {
    "stale": ("stale cache", COLORS["grey"]),
    "field_only": ("field-only cache", COLORS["vermilion"]),
    "new": ("new cache", COLORS["blue"]),
    "swapped": ("stale, rule swapped", COLORS["orange"]),
}
_BANDS = ("early", "mid", "late", "all")
_CONTRASTS = {"erased": {"stale": 1.0, "new": -1.0}, "field_difference": {"field_only": 1.0, "stale": -1.0}}
"""The weight of each cache's shift (critique ME3)."""
# Sets of equal mass are matched to the positions of high effect alone.
_CONTROLS = {"effect": ("random", "equal_mass", "low_effect"), "attention": ("random", "low_effect")}


def effects(sample: Sample, _: Knockout) -> Iterator[Effect]:
    """Shifts and flips by key set and cache, differences between caches, and those between key sets.

    `X.erased` is the share of the gap between `new` and `stale` that hiding the set X removes. `X.field_difference`
    is by how much more it moves `field_only` than `stale`, caches that differ in the field alone: whether the new
    field is read once the notes are not. `X.default_shift` is the half sum of the shifts on `stale` and `swapped`,
    where the notes call for opposite actions: what masking does whatever they say.
    """
    names = sample.rows["intervention"].unique()
    masked = sample.of(intervention=[name for name in names if name not in ("none", "empty")])
    for condition, part in conditions(masked, *_NUMBERED):
        yield from by_cache(part, condition)
        if len(default := combined(part, {"stale": 0.5, "swapped": 0.5})):
            yield default.mean(f"{condition}.default_shift", "shift", "logits", noise_floor=default.floor)
    for contrast, weights in _CONTRASTS.items():
        yield from contrast_effects(combined(masked, weights), contrast)
    for cache, part in sample.of(intervention="none").by("cache"):
        yield part.rate(f"none.{cache}.follows_new", part.rows["margin"] > 0)
    if len(empty := sample.of(intervention="empty")):
        yield empty.maximum("empty.error", (empty.rows["margin"] - empty.rows["unmasked"]).abs())
    if len(sample):
        yield sample.maximum("noise.margin", "noise_floor")


def names(probe: Knockout) -> Iterator[str]:
    """Those of `effects`."""
    percents = [round(100 * fraction) for fraction in probe.fractions]
    hidden = [condition.format(percent=percent) for condition in _NUMBERED for percent in percents]
    hidden += [f"{band}_layers" for band in _BANDS]
    yield from joined(hidden, _CACHES, ("follows_new", "flip_rate", "margin_shift"))
    yield from joined(hidden, ("default_shift", "attention_mass", *_CONTRASTS))
    for kind, controls in _CONTROLS.items():
        over = [f"{kind}_{percent}_over_{control}" for percent in percents for control in controls]
        yield from joined(over, _CONTRASTS)
    yield from joined("none", _CACHES, "follows_new")
    yield from ("empty.error", NOISE)


def by_cache(sample: Sample, condition: str) -> Iterator[Effect]:
    """`follows_new`, `flip_rate` and `margin_shift` on each cache, and the attention mass that is hidden."""
    for cache, part in sample.by("cache"):
        name, shift = f"{condition}.{cache}", part.rows["margin"] - part.rows["unmasked"]
        yield part.rate(f"{name}.follows_new", part.rows["margin"] > 0)
        yield part.rate(f"{name}.flip_rate", "flipped")
        yield part.mean(f"{name}.margin_shift", shift, "logits", noise_floor=part.floor)
    if len(stale := sample.of(cache="stale")):
        yield stale.mean(f"{condition}.attention_mass", "attention_mass", "attention mass")


def contrast_effects(shifts: Sample, contrast: str) -> Iterator[Effect]:
    """One contrast of every key set, and how much larger it is for high effect or attention than for control sets."""
    for condition, part in conditions(shifts, *_NUMBERED):
        yield part.recovery(f"{condition}.{contrast}", "shift")
    for kind, controls in _CONTROLS.items():
        for condition, part in conditions(shifts, f"{kind}_{{percent}}"):
            if condition != f"{kind}_{{percent}}":
                continue
            percent = part.parameters["percent"]
            for control in controls:
                yield from recovery_difference(
                    shifts.named(percent=percent),
                    f"{condition}_over_{control}.{contrast}",
                    f"{kind}_{percent}",
                    f"{control}_{percent}",
                    by="intervention",
                    column="shift",
                )


def combined(sample: Sample, weights: Mapping[str, float]) -> Sample:
    """[pair and intervention] `shift`, in logits: the weighted sum of the shifts on several caches.

    Several draws enter with their mean; a pair that lacks one of the caches is left out.
    """
    part = sample.of(cache=tuple(weights))
    moved = part.table(part.rows.assign(shift=part.rows["margin"] - part.rows["unmasked"]))
    means = moved.rows.pivot_table(index=["pair", "intervention"], columns="cache", values="shift")
    summed = means.reindex(columns=list(weights)).mul(pd.Series(weights)).sum(axis=1, skipna=False).dropna()
    once = moved.per("pair", "intervention", m_base="first", m_donor="first")
    return once.table(once.rows.loc[once.rows.index.isin(summed.index)].assign(shift=summed).reset_index())


def follows_dots(panel: Panel, effect: Effect) -> pd.Series:
    """Each skeleton's share of decisions for the new value."""
    rows = panel.rows_of(effect)
    return (rows["margin"] > 0).astype(float).groupby(rows["skeleton"]).mean()


_HIDDEN = "hidden share of positions (%)"
_DECISIONS = Doses(
    {
        Curve(f"attention_{{percent}}.{cache}", also=((0.0, f"none.{cache}.follows_new"),)): look
        for cache, look in _CACHES.items()
    },
    "decisions for\nthe new value",
    2.2,
    _HIDDEN,
    "follows_new",
)
_ERASED = Doses(_KEYS, "erased share of the gap\nbetween new and stale", 2.2, _HIDDEN, "erased", "s")

READING = Reading(
    effects,
    FigureSpec(
        "What is decided when the decision token cannot see the notes?",
        (
            _DECISIONS,
            _ERASED,
            Bars(
                {f"{band}_layers.field_only.follows_new": (band, COLORS["vermilion"]) for band in _BANDS},
                "decisions for the new\nvalue, field only",
                2.0,
                dots=follows_dots,
                xlabel="layers in which all are hidden",
            ),
        ),
        main=DosesByModel(
            ("effect_{percent}", "erased"),
            ("equal_mass_{percent}", "erased"),
            "Notes hidden; dashed: equal attention",
            _HIDDEN,
            "erased share of the gap",
            log=False,
        ),
        key=doses_key(_DECISIONS, _ERASED),
    ),
    paper={
        "none.field_only.follows_new": PaperEntry(
            "graded_knockout", "mask_top_0.0_of_downstream_by_attention", "P_safe"
        ),
        **{
            f"attention_{round(100 * f)}.field_only.follows_new": PaperEntry(
                "graded_knockout", f"mask_top_{f}_of_downstream_by_attention", "P_safe"
            )
            for f in FRACTIONS
        },
        **{
            f"{band}_layers.field_only.follows_new": PaperEntry(
                "layerband_knockout", f"mask_downstream_in_{band}_layers", "P_safe"
            )
            for band in _BANDS
        },
    },
    step=5,
    names=names,
)
