"""What the rows of `chain_knockout` mean: decisions by arm and cache, and what each knockout takes away."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.mechanism.chain_knockout.probe import ChainKnockout
from kvprobe.stats import NOISE, Effect, Sample, joined

_ARMS = {
    "free": "nothing",
    "block_field": "field, from\nthe chain",
    "block_rule": "a bit of the rule,\nfrom the chain",
    "mask_field": "field",
    "mask_downstream": "prompt after\nthe field",
    "mask_chain": "chain",
    "mask_both": "prompt after\nfield and chain",
    "mask_random": "as many\nrandom tokens",
}
_CACHES = {
    "stale": ("stale cache", COLORS["grey"], "s"),
    "field_only": ("field only cache", COLORS["vermilion"], "o"),
    "new": ("new cache", COLORS["blue"], "^"),
}


def effects(sample: Sample, _: ChainKnockout) -> Iterator[Effect]:
    """Decisions by arm and cache, what each knockout takes away, and how often chains change or are cut off."""
    for arm, cache, part in sample.by("arm", "cache"):
        if arm != "same_value":
            yield from _of_cell(part, f"{arm}.{cache}")
    for arm, _part in sample.by("arm"):
        if arm not in ("free", "same_value"):
            yield from _differences(sample, arm)
    if len(again := sample.of(arm="same_value")):
        changed = 1.0 - again.rows["same_chain"].astype(float)
        yield again.maximum("same_value.chain_changed", changed, "fraction")
    if len(free := sample.of(arm="free")):
        yield free.rate("free.censored", "censored")
        yield free.mean("free.length", "chain_tokens", "tokens")
    yield sample.maximum("noise.margin", "noise_floor")


def names(_: ChainKnockout) -> Iterator[str]:
    """Those of `effects`."""
    masked = [arm for arm in _ARMS if arm != "free"]
    blocked = [arm for arm in masked if arm.startswith("block")]
    yield from joined(_ARMS, _CACHES, "follows_new")
    yield from joined(masked, _CACHES, "margin_shift")
    yield from joined(blocked, _CACHES, "chain_changed")
    yield from joined((*blocked, "free"), _CACHES, "names_new_value")
    yield from joined(masked, ("drop", "drop_over_new", "field_difference"))
    yield from ("same_value.chain_changed", "free.censored", "free.length", NOISE)


def _of_cell(sample: Sample, condition: str) -> Iterator[Effect]:
    """`follows_new`; for a knockout also `margin_shift`; for one during the chain also what became of the chain."""
    rows = sample.rows
    free, blocked = condition.startswith("free"), condition.startswith("block")
    yield sample.rate(f"{condition}.follows_new", rows["margin"] > 0)
    if not free:
        shift = rows["margin"] - rows["free_margin"]
        yield sample.mean(f"{condition}.margin_shift", shift, "logits", noise_floor=sample.floor)
    if blocked:
        yield sample.rate(f"{condition}.chain_changed", ~rows["same_chain"].astype(bool))
    if free or blocked:
        yield sample.rate(f"{condition}.names_new_value", "names_new_value")


def _differences(sample: Sample, arm: str) -> Iterator[Effect]:
    """`drop`: the share of decisions on the field-only cache that stop following the new value under a knockout.

    `drop_over_new` is how much larger it is than on the new cache, where notes and field agree; `field_difference` is
    the same contrast in logits of margin shift.
    """
    cells = sample.of(arm=("free", arm), cache=("field_only", "new"))
    follows = (cells.rows["margin"] > 0).astype(float)
    # With no change at all the spread is 0, though one more pair might have changed: the floor is one pair.
    yield from cells.difference(
        f"{arm}.drop",
        follows,
        ("arm", "cache"),
        ("free", "field_only"),
        (arm, "field_only"),
        noise_floor=None,
    )
    sign = np.where((cells.rows["arm"] == "free") == (cells.rows["cache"] == "field_only"), 1.0, -1.0)
    signed = cells.table(cells.rows.assign(drop=sign * follows, shift=-sign * cells.rows["margin"]))
    pairs = signed.per("pair", drop="sum", shift="sum", cells=("arm", "size"))
    if len(whole := pairs.table(pairs.rows[pairs.rows["cells"] == 4])):
        yield whole.mean(f"{arm}.drop_over_new", "drop", noise_floor=1 / len(whole))
        yield whole.mean(f"{arm}.field_difference", "shift", "logits", noise_floor=sample.floor)


READING = Reading(
    effects,
    FigureSpec(
        "Does a chain of thought read the field again, or does the decision need the notes?",
        (
            Rates(
                _ARMS,
                tuple(
                    Series(f"{{arm}}.{cache}.follows_new", label, color, marker)
                    for cache, (label, color, marker) in _CACHES.items()
                ),
                "decisions for the new value",
                3.6,
                ylabel="hidden",
            ),
        ),
        main=RatesByModel(
            {f"{arm}.field_only.follows_new": label for arm, label in _ARMS.items()},
            "After a chain, by what was hidden",
            "decisions for the new value",
        ),
    ),
    paper={
        "free.field_only.follows_new": PaperEntry("cot_knockout", "base", "P_safe"),
        "mask_downstream.field_only.follows_new": PaperEntry("cot_knockout", "KO_orig_downstream", "P_safe"),
        "mask_chain.field_only.follows_new": PaperEntry("cot_knockout", "KO_all_fresh_cot", "P_safe"),
        "block_field.field_only.follows_new": PaperEntry("cot_reread_block", "block_cot_field", "P_correct"),
        "mask_field.field_only.follows_new": PaperEntry("cot_reread_block", "block_dec_field", "P_correct"),
        "block_rule.field_only.follows_new": PaperEntry("cot_reread_block", "block_cot_gate", "P_correct"),
    },
    names=names,
)
