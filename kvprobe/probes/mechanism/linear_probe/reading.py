"""What the rows of `linear_probe` mean: accuracies by what is new in the tested prompts, selectivity, readouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from kvprobe.figures.bars import Bars
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.profiles import Profiles
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.decoding import accuracy, right_share
from kvprobe.probes.mechanism.linear_probe.probe import TARGETS, LinearProbe
from kvprobe.probes.mechanism.linear_probe.readout import ARMS
from kvprobe.stats import Effect, Sample, joined

_LINES = {
    ("conclusion", "first_case"): ("conclusion, end of the first case", COLORS["sky"], "s"),
    ("conclusion", "rule"): ("conclusion, end of the rule", COLORS["blue"], "o"),
    ("conclusion", "task"): ("conclusion, end of the task", COLORS["green"], "v"),
    ("conclusion", "decision"): ("conclusion, decision token", COLORS["vermilion"], "^"),
    ("other_xor", "rule"): ("other exclusive or, end of the rule", COLORS["grey"], "x"),
}


def effects(sample: Sample, _: LinearProbe) -> Iterator[Effect]:
    """Accuracies at layers chosen on other skeletons and, in sample, at the best layer; selectivity; readouts."""
    probes = sample.of(measurement="probe")
    for target, place, split, part in probes.by("target", "place", "split"):
        condition = f"{target}.{place}" if split == "skeleton" else f"{target}.{place}.{split}"
        yield from accuracy(part.of(chosen=True), f"{condition}.accuracy")
        if (target, split) == ("conclusion", "skeleton"):
            best = right_share(part.rows).groupby(part.rows["layer"]).mean().idxmax()
            yield from accuracy(part.of(layer=best), f"{condition}.in_sample")
    for place, part in probes.of(split="skeleton", chosen=True).by("place"):
        # At the same layer and in the same pairs.
        right = right_share(part.rows)
        yield from part.difference(f"selectivity.{place}", right, "target", "conclusion", "other_xor")
    for arm, part in sample.of(measurement="readout", chosen=True).by("arm"):
        yield part.rate(f"readout.{arm}.says_new", "says_new")


def names(probe: LinearProbe) -> Iterator[str]:
    """Those of `effects`."""
    for split, targets in TARGETS.items():
        read = joined(targets, probe.places)
        yield from joined(read, "accuracy" if split == "skeleton" else f"{split}.accuracy")
    yield from joined("conclusion", probe.places, "in_sample")
    yield from joined("selectivity", probe.places)
    yield from joined("readout", ARMS, "says_new")


def _by_layer(panel: Panel) -> Mapping[str, tuple[pd.Series, str, str]]:
    probes = panel.rows[(panel.rows["measurement"] == "probe") & (panel.rows["split"] == "skeleton")]
    means = right_share(probes).groupby([probes[key] for key in ("target", "place", "layer")]).mean()
    known = {(target, place) for target, place, _ in means.index}
    return {label: (means[key], color, marker) for key, (label, color, marker) in _LINES.items() if key in known}


READING = Reading(
    effects,
    FigureSpec(
        'Linear probes of "the first case fires": chance is 0.5',
        (
            Profiles(
                _by_layer,
                "accuracy on\nother skeletons",
                2.2,
                levels=(0.5,),
                xlabel="blocks run",
                ylim=(0.4, 1.03),
            ),
            Bars(
                {
                    "conclusion.rule.pair.accuracy": ("pairs", COLORS["grey"]),
                    "conclusion.rule.accuracy": ("skeletons", COLORS["blue"]),
                    "conclusion.rule.vocabulary.accuracy": ("words", COLORS["blue"]),
                    "conclusion.rule.wording.accuracy": ("wordings", COLORS["blue"]),
                    "conclusion.rule.field.accuracy": ("value", COLORS["blue"]),
                },
                "accuracy where\nthese are new",
                1.7,
                levels=(0.5,),
                label_size=7.5,
                ylim=(0.4, 1.03),
                dots=None,
            ),
            Bars(
                {
                    "readout.stale.says_new": ("stale", COLORS["grey"]),
                    "readout.in_place.says_new": ("edited\nin place", COLORS["vermilion"]),
                    "readout.erratum.says_new": ("erratum", COLORS["green"]),
                    "readout.full.says_new": ("recom-\nputed", COLORS["blue"]),
                },
                "decision token\nreads as new",
                1.7,
                levels=(0.5,),
                label_size=7.5,
                ylim=(0.0, 1.03),
                dots=None,
            ),
        ),
        main=EffectsByModel(
            {
                "conclusion.rule.accuracy": "end of\nthe rule",
                "other_xor.rule.accuracy": "other\nXOR there",
                "shuffled.rule.accuracy": "shuffled\nlabels",
                "conclusion.decision.accuracy": "decision\ntoken",
            },
            "Linear probes of the conclusion",
            ylabel="accuracy",
            levels=(0.5, 1.0),
            ylim=(0.3, 1.05),
        ),
        key_columns=3,
    ),
    paper={
        "conclusion.decision.accuracy": PaperEntry(
            "linear_decodability", "layer26_leave_one_domain_out", "probe_accuracy"
        ),
        **{
            f"readout.{arm}.says_new": PaperEntry("linear_decodability", f"readout_under_{arm}", "P_probe_says_new")
            for arm in ARMS
        },
    },
    names=names,
)
