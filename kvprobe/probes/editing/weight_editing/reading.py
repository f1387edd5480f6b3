"""What the rows of `weight_editing` mean: whether an edit turns its request, what else it changes, what it costs.

By arm X: `X.efficacy`, the share of edited requests that decide by the new value; `X.contamination`, the share of
concurrent requests deciding by their old value that the edit flips, and `X.contamination_on_shared_prefix`,
`X.other_wording`, `X.contamination_by_edited_prefix` for some of them; `X.collateral`, the share of prompts of other
skeletons whose decision changes; `X.latency`, the median time in full reprefills. Of methods that edit weights also
`X.validation.switched`, `X.validation.kept` and `X.usable` (1 or 0); over all of them `weights.bit_equal`, the share of
edits after which the weights were as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.weight_editing.arms import COLLATERAL, EDITED_PREFIX, TARGET
from kvprobe.probes.editing.weight_editing.concurrent_requests import OTHER_WORDING, OWN_PREFIX, SHARED_PREFIX
from kvprobe.probes.editing.weight_editing.probe import TOGETHER, WeightEditing
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, baseline_effects
from kvprobe.stats import NOISE, Effect, Sample, joined, maximum, proportion

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLIPPED = {
    "contamination": (SHARED_PREFIX, OWN_PREFIX),
    "contamination_on_shared_prefix": (SHARED_PREFIX,),
    "other_wording": (OTHER_WORDING,),
    "contamination_by_edited_prefix": (EDITED_PREFIX,),
}
_ARMS = {
    "rome": "ROME",
    "memit": "MEMIT",
    "memit_together": "MEMIT,\nseveral at once",
    "lora": "LoRA",
    "lora_per_request": "LoRA for its\nrequest alone",
    "field_only": "field only",
    "erratum": "erratum",
    "full_downstream": "full\ndownstream",
}
_WEIGHT_EDITS = 5
_PAPER_ARMS = {"rome": "rome", "lora": "lora_ft", "erratum": "kv_erratum", "field_only": "kv_inplace"}
_PAPER_METRICS = {
    "efficacy": "flips_decision",
    "contamination": "cross_request_contamination",
    "collateral": "collateral_drift",
}


def effects(sample: Sample, _: WeightEditing) -> Iterator[Effect]:
    """By arm, then what must hold of all weight edits, the constant baselines and the noise."""
    for arm, part in sample.by("arm"):
        if len(part.measured("validation_switched")):
            yield from _validation_effects(part, arm)
        yield from _decision_effects(part.measured("margin"), arm)
    if len(edits := sample.of(prompt=TARGET).measured("weights_equal")):
        yield edits.rate("weights.bit_equal", "weights_equal")
    yield from baseline_effects(sample)
    yield sample.noise()


def names(probe: WeightEditing) -> Iterator[str]:
    """Those of `effects`."""
    methods = (*probe.weight_edits, TOGETHER, *(f"{method}_per_request" for method in probe.weight_edits))
    yield from joined((*methods, *probe.cache_edits), ("efficacy", "latency", *_FLIPPED, "collateral"))
    yield from joined(methods, ("validation.switched", "validation.kept", "usable"))
    yield from ("weights.bit_equal", *BASELINE_RATES, NOISE)


def _validation_effects(sample: Sample, arm: str) -> Iterator[Effect]:
    """Of one model's validation, which all rows of the arm repeat."""
    found = sample.rows.iloc[0]
    for name, count in (("switched", "edits"), ("kept", "neighbours")):
        total = int(found[f"validation_{count}"])
        successes = np.arange(total) < round(found[f"validation_{name}"] * total)
        label = sample.label(f"{arm}.validation.{name}")
        yield sample.made(proportion(label, successes, statistics=sample.statistics))
    yield sample.made(maximum(sample.label(f"{arm}.usable"), [float(found["usable"])], unit="fraction"))


def _decision_effects(sample: Sample, arm: str) -> Iterator[Effect]:
    if len(target := sample.of(prompt=TARGET)):
        yield target.rate(f"{arm}.efficacy", "new")
        ratio = (target.rows["seconds"] / target.rows["reprefill_seconds"]).astype(float)
        yield target.median(f"{arm}.latency", ratio, "reprefills")
    for name, prompts in _FLIPPED.items():
        part = sample.of(prompt=prompts)
        # Of those that decided by their own, old value before; the others cannot be flipped.
        if len(old := part.where(~part.rows["new_before"].astype(bool), exclude=True)):
            yield old.rate(f"{arm}.{name}", "new")
    if len(others := sample.of(prompt=COLLATERAL)):
        yield others.rate(f"{arm}.collateral", "changed")


@dataclass(frozen=True)
class Shares(Rates):
    """Shares of decisions by arm; an arm whose validation edits failed says so."""

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the arms of one model."""
        super().draw(axes, panel)
        for place, arm in enumerate(self.arms):
            switched, kept = (panel.effects.get(f"{arm}.validation.{name}") for name in ("switched", "kept"))
            if switched and kept and f"{arm}.efficacy" not in panel.effects:
                told = (
                    f"not usable: {switched.estimate:.0%} of {switched.n} validation edits\n"
                    f"switch, {kept.estimate:.0%} of {kept.n} neighbours stay"
                )
                # Above the place of the last share, where the paper may have a value.
                axes.text(0.5, place - 0.2, told, ha="center", va="center", fontsize=6.5, color=COLORS["grey"])


READING = Reading(
    effects,
    FigureSpec(
        "Edit the weights or the cache: which other requests change, and what does it cost?",
        (
            Shares(
                _ARMS,
                (
                    Series("{arm}.efficacy", "edited request: new decision", COLORS["blue"]),
                    Series(
                        "{arm}.contamination",
                        "concurrent requests, old value: flipped",
                        COLORS["vermilion"],
                        "s",
                    ),
                    Series(
                        "{arm}.contamination_by_edited_prefix",
                        "those that read the edited entries",
                        COLORS["orange"],
                        "v",
                    ),
                    Series("{arm}.collateral", "other skeletons: decision changed", COLORS["purple"], "^"),
                ),
                "share of decisions",
                4.6,
                breaks=(_WEIGHT_EDITS,),
            ),
            Rates(
                _ARMS,
                (Series("{arm}.latency", "time of the edit", COLORS["ink"]),),
                "time until the request can be decided,\nin full reprefills (log scale)",
                3.2,
                levels=(1.0,),
                xlim=(None, None),
                log=True,
                breaks=(_WEIGHT_EDITS,),
            ),
        ),
        main=RatesByModel(
            {f"{arm}.contamination": label for arm, label in _ARMS.items() if arm != "memit_together"},
            "Edit the weights or the cache",
            "concurrent requests flipped",
        ),
        key_columns=2,
    ),
    paper={
        f"{ours}.{effect}": PaperEntry("weight_editing", theirs, metric)
        for ours, theirs in _PAPER_ARMS.items()
        for effect, metric in _PAPER_METRICS.items()
    },
    may_lack={
        f"{method}*": f"{method} failed its validation edits on this model and was not used."
        for method in ("rome", "memit", "lora")
    },
    names=names,
)
