"""What the rows of `direction` mean: recovery along directions, leads over the controls, necessity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from kvprobe.figures.bars import Bars, recovery_by, recovery_by_skeleton
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel
from kvprobe.figures.profiles import Profiles
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.differences import recovery_difference
from kvprobe.probes.kit.reading.patching import DECISION, decision_effects
from kvprobe.probes.mechanism.direction.probe import Direction
from kvprobe.probes.mechanism.direction.steps import CONTROLS, INTERVENTIONS
from kvprobe.stats import Effect, Sample, joined

_LINES = {
    "full": ("everything", COLORS["grey"], "s"),
    "along": ("difference of means", COLORS["blue"], "o"),
}


def effects(sample: Sample, _: Direction) -> Iterator[Effect]:
    """Recovery, margin shift and flip rate of each intervention, leads over the controls, and necessity."""
    chosen = sample.of(chosen=True)
    for intervention, part in chosen.of(intervention=INTERVENTIONS).by("intervention"):
        yield from decision_effects(part, intervention)
    for control in CONTROLS:
        name = f"lead_over_{control}.recovery"
        yield from recovery_difference(chosen, name, "along", control, by="intervention")
    for name in ("necessity", "necessity_random"):
        if len(part := chosen.of(intervention=name)):
            yield part.ratio(f"{name}.drop", _lost(part.rows), part.gap, noise_floor=part.floor)
    if len(full := sample.of(intervention="full")):
        depth = (full.rows["layer"] + 1) / (full.rows["layer"].max() + 1)
        at_chosen = full.rows["chosen"].astype(bool)
        yield full.where(at_chosen).mean("chosen.depth", depth[at_chosen])


def names(_: Direction) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined(INTERVENTIONS, DECISION)
    yield from joined([f"lead_over_{control}" for control in CONTROLS], "recovery")
    yield from ("necessity.drop", "necessity_random.drop", "chosen.depth")


def _lost(rows: pd.DataFrame) -> pd.Series:
    """[row] how far the margin of the donor prompt falls, in logits."""
    return rows["m_donor"] - rows["margin"]


def _dots(panel: Panel, effect: Effect) -> pd.Series:
    rows = panel.rows_of(effect)
    return recovery_by_skeleton(rows, _lost(rows) if effect.metric == "drop" else None)


def _by_layer(panel: Panel) -> Mapping[str, tuple[pd.Series, str, str]]:
    recovery = recovery_by(panel.rows[panel.rows["intervention"].isin(_LINES)], "intervention", "layer")
    return {label: (recovery[name], color, marker) for name, (label, color, marker) in _LINES.items()}


READING = Reading(
    effects,
    FigureSpec(
        "Does one direction of the notes carry the conclusion to other skeletons?",
        (
            Bars(
                {
                    "full.recovery": ("everything", COLORS["grey"]),
                    "along.recovery": ("difference of means", COLORS["blue"]),
                    "das.recovery": ("optimised (DAS)", COLORS["blue"]),
                    "logistic.recovery": ("logistic probe", COLORS["blue"]),
                    "orthogonal.recovery": ("all the rest", COLORS["green"]),
                    "random.recovery": ("random", COLORS["vermilion"]),
                    "shuffled.recovery": ("shuffled labels", COLORS["vermilion"]),
                    "other_concept.recovery": ("case order", COLORS["vermilion"]),
                    "component.recovery": ("first component", COLORS["vermilion"]),
                    "orthogonal_matched.recovery": ("the rest, as long", COLORS["vermilion"]),
                    "necessity.drop": ("lost without it", COLORS["purple"]),
                },
                "recovery of the new decision\n(last: share of it lost)",
                3.4,
                label_size=7.5,
                label_rotation=90,
                dots=_dots,
            ),
            Profiles(_by_layer, "recovery", 1.7, levels=(0.0, 1.0), xlabel="after block"),
        ),
        main=EffectsByModel(
            {
                "full.recovery": "every-\nthing",
                "along.recovery": "along",
                "random.recovery": "random",
                "orthogonal.recovery": "the rest",
                "necessity.drop": "lost\nwithout",
            },
            "One direction of the notes",
        ),
        key_title="Vermilion: controls as long as the step along the difference of means, towards the donor.",
        key_columns=5,
    ),
    names=names,
)
