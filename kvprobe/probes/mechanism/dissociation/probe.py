"""Dissociation of conclusion and content (protocol 2.1, family B; critique ME6).

The task `polarity` crosses the field's value with the value that the rule names (its trigger): one conclusion holds
where they are equal, the other where they differ. Entries of the base's cache are transplanted from the three other
cells of the square. "Notes" are all entries after the trigger: they are the same tokens in every cell.

From the donor, whose trigger differs (the opposite conclusion):

    trigger_only      the trigger's own entries
    notes             the entries after it
    full_downstream   both: equal to the donor by construction, so it checks the implementation
    rule_rest         of the notes, those of the rule's remaining tokens
    after_rule        of the notes, all others

From the two other cells, into the base whose field and trigger stay as they are:

    other_field_notes       notes written under the other field and the same rule text: the opposite conclusion
    same_conclusion_notes   notes written under the other field *and* the other trigger: nothing they read is the
                            same, but the conclusion is
    same_conclusion_tokens  field and trigger themselves from that cell

Notes that hold what was read (the field or the trigger, to be compared at the decision) would turn the decision under
`same_conclusion_notes`; notes that hold the conclusion leave it, and turn it under the two others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
from pydantic import Field

from kvprobe.engine.cache import KVCache
from kvprobe.engine.interventions import KVPatch
from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.decisions import decision_row, prefill_decided, read_patched
from kvprobe.probes.kit.measures import decision_effects, shapley_split
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, maximum, ratio_of_sums
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

FROM_DONOR = ("trigger_only", "notes", "full_downstream", "rule_rest", "after_rule")
FROM_OTHER_FIELD = ("other_field_notes",)
FROM_BOTH_CHANGED = ("same_conclusion_notes", "same_conclusion_tokens")
INTERVENTIONS = FROM_DONOR + FROM_OTHER_FIELD + FROM_BOTH_CHANGED


@PROBES.register("dissociation")
class Dissociation(Probe):
    """Whether notes after a rule hold the conclusion or what it was drawn from: the 2x2 of field and trigger."""

    name: ClassVar[str] = "dissociation"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{condition}.recovery": PaperEntry("dissociation", condition, "decision_recovery")
        for condition in ("trigger_only", "notes", "full_downstream")
    }

    class Parameters(base.Parameters):
        """Nothing here changes a result."""

        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each intervention.

        `source_right` says whether the model decides the prompt that the entries come from as the rule says.

        Raises:
            ConfigError: a pair lacks the task's variants.
        """
        rows = []
        for index, pair in enumerate(pairs):
            rows += [{"pair": index, **row} for row in self._measure_pair(subject, pair)]
            progress(index + 1, len(pairs))
        return rows

    def _measure_pair(self, subject: Subject, pair: Pair) -> list[Measurement]:
        missing = {"field_changed", "both_changed"} - set(pair.variants)
        if missing:
            raise ConfigError(
                f"The probe dissociation needs pairs with the variant {min(missing)!r}: use task polarity."
            )
        unedited = prefill_pair(subject, pair)
        sources = {name: prefill_decided(subject, pair, prompt) for name, prompt in pair.variants.items()}
        # The conclusion is the donor's where one of field and trigger differs, and the base's where both do.
        right = {
            "donor": unedited.donor.margin > 0,
            "field_changed": sources["field_changed"][1].margin > 0,
            "both_changed": sources["both_changed"][1].margin < 0,
        }
        caches = {"donor": unedited.oracle, **{name: cache for name, (cache, _) in sources.items()}}
        patches = interventions(pair, caches)
        readings = read_patched(
            subject, pair, pair.base, unedited.stale, list(patches.values()), batch_size=self.parameters.batch_size
        )
        rows = []
        for (name, patch), reading in zip(patches.items(), readings, strict=True):
            row = decision_row(name, unedited.base, reading, len(patch.positions))
            rows.append({**unedited.common(), **row, "source_right": right[source_of(name)]})
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Recovery, margin shift and flip rate of each intervention, the split of the effect, the contrast of ME6."""
        floor = float(rows["noise_floor"].max())
        effects: list[Effect] = []
        for intervention in INTERVENTIONS:
            part = rows[rows["intervention"] == intervention]
            usable = part[part["source_right"].astype(bool)]
            # A prompt that the model itself decides wrongly has no notes of the conclusion that it ought to have.
            if len(usable):
                left_out = len(part) - len(usable)
                effects += [replace(e, excluded=left_out) for e in decision_effects(usable, statistics, floor)]
        effects += shapley_split(rows, FROM_DONOR[:3], ("trigger", "notes"), statistics, floor)
        effects += _contrast(rows, statistics, floor)
        full = rows[rows["intervention"] == "full_downstream"]
        error = (full["margin"] - full["m_donor"]).abs()
        effects.append(maximum("full_downstream.error", error, clusters=full[statistics.cluster]))
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Recovery by what was transplanted; one column for each model."""
        from kvprobe.probes.mechanism.dissociation.figure import draw_dissociation

        return draw_dissociation(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Recovery of all models into one axes."""
        from kvprobe.probes.mechanism.dissociation.figure import dissociation_panel

        dissociation_panel(axes, panels)


def interventions(pair: Pair, caches: Mapping[str, KVCache]) -> dict[str, KVPatch]:
    """The transplants by name; `caches` are those of the prompts `donor`, `field_changed` and `both_changed`."""
    spans = pair.base.spans
    trigger, notes = tuple(pair.field.positions), tuple(pair.downstream.positions)
    rule_rest = tuple(spans["policy_rest"].positions)
    positions = {
        "trigger_only": trigger,
        "notes": notes,
        "full_downstream": trigger + notes,
        "rule_rest": rule_rest,
        "after_rule": tuple(position for position in notes if position not in set(rule_rest)),
        "other_field_notes": notes,
        "same_conclusion_notes": notes,
        "same_conclusion_tokens": (*spans["field"].positions, *trigger),
    }
    return {name: KVPatch(positions[name], caches[source_of(name)]) for name in INTERVENTIONS}


def source_of(intervention: str) -> str:
    """The prompt that an intervention takes its entries from."""
    if intervention in FROM_DONOR:
        return "donor"
    return "field_changed" if intervention in FROM_OTHER_FIELD else "both_changed"


def _contrast(rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """How much more notes of the other conclusion do than notes of other content with the same conclusion."""
    names = ["other_field_notes", "same_conclusion_notes"]
    usable = rows[rows["intervention"].isin(names) & rows["source_right"].astype(bool)]
    margin = usable.pivot(index="pair", columns="intervention", values="margin").reindex(columns=names).dropna()
    if margin.empty:
        return []
    pairs = rows.groupby("pair").first()
    left_out, pairs = len(pairs) - len(margin), pairs.loc[margin.index]
    return [
        ratio_of_sums(
            "conclusion_over_content.recovery",
            margin[names[0]] - margin[names[1]],
            pairs["m_donor"] - pairs["m_base"],
            clusters=pairs[statistics.cluster],
            statistics=statistics,
            noise_floor=floor,
            excluded=left_out,
        )
    ]
