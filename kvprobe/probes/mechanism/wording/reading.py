"""What the rows of `wording` mean: decisions for the new value by line and context, and contrasts between cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.mechanism.wording.probe import CONTEXTS, WordingProbe
from kvprobe.stats import NOISE, Effect, Sample, joined

_Cell = tuple[str, str]
CONTRASTS: Mapping[str, tuple[_Cell, _Cell]] = {
    "value": (("stale", "restatement"), ("stale", "none")),
    "tag": (("stale", "update"), ("stale", "restatement")),
    "override_clause": (("stale", "override"), ("stale", "update")),
    "any_line": (("stale", "neutral"), ("stale", "none")),
    "value_against_form": (("stale", "override"), ("stale", "old_value")),
    "field_alone": (("in_place", "none"), ("stale", "none")),
    "field_under_void": (("in_place", "voids_conclusions"), ("stale", "voids_conclusions")),
    "field_under_override": (("in_place", "override"), ("stale", "override")),
    "void_on_new": (("recomputed", "voids_conclusions"), ("recomputed", "none")),
}
"""The first cell minus the second."""
_LINES = {
    "none": "no line",
    "neutral": "neutral,\nas long",
    "old_value": "override,\nold value",
    "voids_conclusions": "voids\nearlier answer",
    "restatement": "plain\nrestatement",
    "update": "tagged\nupdate",
    "override": "tagged,\noverride",
}
_CONTEXTS = {
    "stale": ("old value in the context", COLORS["vermilion"], "o"),
    "in_place": ("new value at the field alone", COLORS["blue"], "s"),
    "recomputed": ("new value throughout", COLORS["green"], "^"),
}
_MODES = {"direct": "", "think": ",\nafter a chain of thought"}
_PAPER_LINES = {
    "none": "none",
    "restatement": "value_only",
    "update": "update_tag",
    "override": "override_full",
    "voids_conclusions": "conclusion",
}


def effects(sample: Sample, _: WordingProbe) -> Iterator[Effect]:
    """Share of decisions for the new value and recovery in every cell, contrasts, finished chains, noise."""
    for mode, part in sample.by("mode"):
        for context, line, cell in part.by("context", "line"):
            yield cell.rate(f"{mode}.{context}.{line}.new_rate", "new")
            yield cell.recovery(f"{mode}.{context}.{line}.recovery")
        for name, (first, second) in CONTRASTS.items():
            yield from part.difference(f"{mode}.{name}.difference", "new", ("context", "line"), first, second)
        if mode == "think":
            yield part.rate(f"{mode}.chains_finished", "chain_finished")
    yield sample.noise()


def names(_: WordingProbe) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined(_MODES, CONTEXTS, _LINES, ("new_rate", "recovery"))
    yield from joined(_MODES, CONTRASTS, "difference")
    yield from ("think.chains_finished", NOISE)


READING = Reading(
    effects,
    FigureSpec(
        "What must a line before the task say to turn the decision?",
        (
            Rates(
                _LINES,
                tuple(
                    Series(f"{mode}.{context}.{{arm}}.new_rate", f"{label}{how}", color, marker)
                    for mode, how in _MODES.items()
                    for context, (label, color, marker) in _CONTEXTS.items()
                ),
                "share of decisions\nfor the new value",
                4.0,
            ),
        ),
        main=RatesByModel(
            {f"{mode}.stale.{line}.new_rate": _LINES[line] for mode in _MODES for line in _LINES},
            "One line after a stale context",
            "share of new decisions",
        ),
        key_columns=3,
    ),
    paper={
        **{
            f"think.recomputed.{ours}.new_rate": PaperEntry("wording_ablation", theirs, "P_safe")
            for ours, theirs in _PAPER_LINES.items()
        },
        "direct.stale.override.new_rate": PaperEntry("erratum_phrasing", "override_full", "P_correct"),
        "direct.stale.restatement.new_rate": PaperEntry("erratum_phrasing", "bare_value", "P_correct"),
        "direct.stale.old_value.new_rate": PaperEntry("erratum_content_control", "err_wrong", "P_correct"),
        "direct.stale.none.new_rate": PaperEntry("erratum_content_control", "stale", "P_correct"),
        "think.stale.override.new_rate": PaperEntry("cot_gate_diverse", "cot/erratum", "P_correct"),
    },
    step=6,
    names=names,
)
