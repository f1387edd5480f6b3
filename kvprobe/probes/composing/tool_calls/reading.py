"""What the rows of `tool_calls` mean: right calls and agreement with a full prefill's, and what seam and header add.

Each arm X has the effects

    X.parsed, X.censored      a call can be read; the limit came first
    X.name_right, X.arguments_right, X.accuracy   the name, all of the arguments, both
    X.agreement, X.same_name, X.same_text, X.kappa   with the full prefill's: the call by value, its name, its
                              very text, the names beyond chance
    seam_gain_none.accuracy, ...   seam_N less splice, for each header
    header_gain.accuracy      splice_neutral less splice_none
"""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.bars import Bars, shares_by_skeleton
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.composing.tool_calls.probe import ToolCallsProbe
from kvprobe.probes.kit.fidelity import FULL_PREFILL, REMOVED, WRONG
from kvprobe.probes.kit.reading.fidelity import PROMPT, by_arm
from kvprobe.stats import Effect, Sample, joined

SHARES = {
    "parsed": "parsed",
    "censored": "censored",
    "name_right": "name_right",
    "arguments_right": "arguments_right",
    "accuracy": "correct",
    "agreement": "agrees",
    "same_name": "same_name",
    "same_text": "same_text",
}
"""Column of each metric."""
_ARMS = {
    FULL_PREFILL: ("full", COLORS["ink"]),
    "splice_none": ("none", COLORS["vermilion"]),
    "splice_neutral": ("neu-\ntral", COLORS["blue"]),
    "splice_real": ("real", COLORS["green"]),
    "seam_8_none": ("none\n+8", COLORS["vermilion"]),
    "seam_8_neutral": ("neu-\ntral\n+8", COLORS["blue"]),
    "seam_8_real": ("real\n+8", COLORS["green"]),
    WRONG: ("other\ntools", COLORS["grey"]),
    REMOVED: ("no\ntools", COLORS["grey"]),
}


def effects(sample: Sample, probe: ToolCallsProbe) -> Iterator[Effect]:
    """Right calls and agreement of every arm, and what seam and header add."""
    for arm, part in by_arm(sample, probe.arms()):
        for metric, column in SHARES.items():
            yield part.rate(f"{arm}.{metric}", column)
        if len({*part.rows["called"], *part.rows["reference_called"]}) > 1:
            yield part.kappa(f"{arm}.kappa", "called", "reference_called")
    gains = {f"seam_gain_{header}": (f"seam_{probe.seam}_{header}", f"splice_{header}") for header in probe.headers}
    for name, arms in {**gains, "header_gain": ("splice_neutral", "splice_none")}.items():
        yield from sample.difference(f"{name}.accuracy", "correct", "arm", *arms, within=PROMPT)


def names(probe: ToolCallsProbe) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined([arm.name for arm in probe.arms()], (*SHARES, "kappa"))
    yield from joined(("header_gain", *(f"seam_gain_{header}" for header in probe.headers)), "accuracy")


def _bars(metric: str, label: str) -> Bars:
    return Bars(
        {f"{arm}.{metric}": look for arm, look in _ARMS.items()},
        label,
        2.1,
        levels=(1.0,),
        label_size=6.5,
        ylim=(-0.05, 1.08),
        dots=shares_by_skeleton(SHARES),
        dot="one tool",
    )


READING = Reading(
    effects,
    FigureSpec(
        "Tool definitions compiled behind nothing, a neutral line, the real prompt",
        (
            _bars("accuracy", "correct calls\n(name and arguments)"),
            _bars("name_right", "correct names"),
            _bars("agreement", "agreement with\nfull prefill"),
        ),
        main=EffectsByModel(
            {
                f"{FULL_PREFILL}.accuracy": "full",
                "splice_none.accuracy": "splice",
                "seam_8_none.accuracy": "splice,\nseam 8",
                "splice_neutral.accuracy": "splice,\nheader",
                f"{WRONG}.accuracy": "other\ntools",
            },
            "Tool calls, name and arguments",
            "correct calls",
            levels=(),
            limits=(0.0, 1.0),
            ylim=(-0.05, 1.08),
            label_size=6.5,
        ),
    ),
    paper={
        f"{FULL_PREFILL}.accuracy": PaperEntry("tool_calling", "full", "function_call_accuracy"),
        "splice_none.accuracy": PaperEntry("tool_calling", "transplant", "function_call_accuracy"),
        "splice_none.same_name": PaperEntry("tool_calling", "transplant_vs_full", "agreement"),
    },
    may_lack={"*.kappa": "All calls are to the same tool.", f"{WRONG}.*": "No other prompt has different definitions."},
    step=6,
    names=names,
)
