"""What the rows of `edit_latency` mean: the cost of each edit as a share of a full reprefill, over the length."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Doses
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.edit_latency.probe import ARMS, REFERENCE, EditLatency
from kvprobe.stats import NOISE, Effect, Sample, joined

METRICS = ("seconds_ratio", "flop_share", "token_share")
_CURVES = {
    "field_only_{length}": ("field only", COLORS["sky"]),
    "erratum_{length}": ("erratum", COLORS["vermilion"]),
    "field_and_erratum_{length}": ("field and erratum", COLORS["purple"]),
    "cacheblend_{length}": ("CacheBlend-style, 15%", COLORS["orange"]),
    "hoist_to_end_{length}": ("hoist to the end", COLORS["grey"]),
    "full_downstream_{length}": ("full downstream", COLORS["green"]),
}


def effects(sample: Sample, probe: EditLatency) -> Iterator[Effect]:
    """`erratum_1024.seconds_ratio` and so on, and how each share changes from the shortest to the longest prompt."""
    for arm, _, part in sample.by("arm", "length"):
        for metric in METRICS:
            yield part.mean(f"{arm}_{{length}}.{metric}", metric)
    longest, shortest = max(probe.lengths), min(probe.lengths)
    for arm, part in sample.by("arm"):
        for metric in METRICS:
            yield from part.difference(f"{arm}.longest_less_shortest.{metric}", metric, "length", longest, shortest)
    yield sample.noise()


def names(_: EditLatency) -> Iterator[str]:
    """Those of `effects`."""
    arms = (*ARMS, REFERENCE)
    yield from joined([f"{arm}_{{length}}" for arm in arms], METRICS)
    yield from joined(arms, "longest_less_shortest", METRICS)
    yield NOISE


READING = Reading(
    effects,
    FigureSpec(
        "What an edit costs, by the length of the prompt",
        tuple(
            Doses(
                _CURVES,
                f"{label} (share of a full reprefill)",
                2.8,
                "tokens of the prompt",
                metric,
                ticks_of="erratum_{length}",
                levels=(1.0,),
                ylim=(0.0, 1.3),
            )
            for metric, label in {"seconds_ratio": "time", "flop_share": "FLOPs"}.items()
        ),
        main=DosesByModel(
            ("erratum_{length}", "seconds_ratio"),
            ("field_only_{length}", "seconds_ratio"),
            "Time of an erratum (solid), in place (dashed)",
            "tokens of the prompt",
            "time / reprefill",
            levels=(1.0,),
            ylim=(0.0, None),
        ),
    ),
    names=names,
)
