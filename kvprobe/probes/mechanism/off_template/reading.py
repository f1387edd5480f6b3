"""What the rows of `off_template` mean: recovery of each patch by template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvprobe.figures.bars import Bars
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.doses import dose_effects, dose_names
from kvprobe.probes.kit.reading.patching import identity_errors
from kvprobe.probes.mechanism.off_template.probe import OffTemplate
from kvprobe.stats import NOISE, Effect, Sample

_PATCHES = {
    "field_only": ("field\nonly", COLORS["vermilion"], "field_only"),
    "suffix_10": ("last\n10%", COLORS["blue"], "suffix_0.1"),
    "suffix_50": ("last\n50%", COLORS["blue"], "suffix_0.5"),
    "full_downstream": ("all", COLORS["grey"], "full_downstream"),
}
"""Label, colour, and condition in the paper's table, by intervention."""
_TEMPLATES = {
    "two_hop": ("a two-hop question", "multihop"),
    "conversation": ("free conversation", "natural"),
    "lookup": ("an attribute lookup", "rag_lookup"),
    "own": ("own prompts", None),
}
"""What it is called, and its name in the paper's table, by template."""


def effects(sample: Sample, _: OffTemplate) -> Iterator[Effect]:
    """Recovery of each patch by template, the error of the full one, noise."""
    for _, part in sample.by("template"):
        yield from dose_effects(part, "{template}")
    yield from identity_errors(sample, {"full_downstream": "m_donor"})
    if len(full := sample.of(intervention="full_downstream")):
        yield full.maximum("noise.margin", "noise_floor")


def names(probe: OffTemplate) -> Iterator[str]:
    """Those of `effects`."""
    # Another task's template is called as that task says.
    yield from dose_names(["*"], probe.fractions)
    yield from ("full_downstream.error", NOISE)


def figure(panels: Sequence[Panel]) -> FigureSpec:
    """A row of bars for each template that was measured."""
    measured = {effect.parameters.get("template") for panel in panels for effect in panel.effects.values()}
    templates = [template for template in _TEMPLATES if template in measured]
    shown = templates or ["own"]
    titles = ", ".join(_TEMPLATES[template][0] for template in templates)
    bars = [
        Bars(
            {f"{template}.{patch}.recovery": (label, color) for patch, (label, color, _) in _PATCHES.items()},
            "recovery of the new decision",
            2.7,
        )
        for template in shown
    ]
    labels = {f"{template}.{patch}.recovery": label for template in shown for patch, (label, _, _) in _PATCHES.items()}
    return FigureSpec(
        f"Which entries carry the effect on {titles or 'other templates'}?",
        tuple(bars),
        main=EffectsByModel(labels, f"Off template: {titles}" if titles else "Off template", limits=(-1.0, 2.0)),
    )


READING = Reading(
    effects,
    figure,
    paper={
        f"{template}.{patch}.recovery": PaperEntry("off_template", f"{named}/{theirs}", "decision_recovery")
        for template, (_, named) in _TEMPLATES.items()
        if named
        for patch, (_, _, theirs) in _PATCHES.items()
    },
    names=names,
)
