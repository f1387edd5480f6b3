"""Dissociation of conclusion and content (protocol 2.1, family B; critique ME6).

The task `polarity` crosses the field's value with the value that the rule names (its trigger): one conclusion holds
where they are equal, the other where they differ. Entries of the base's cache are patched from the three other cells
of the square. "Notes" are all entries after the trigger: they are the same tokens in every cell.

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

Notes that hold what was read (the field or the trigger, to be compared at the decision) flip the decision under
`same_conclusion_notes`. Notes that hold the conclusion do not; they flip it under the two others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from kvprobe.engine.cache import KVCache
from kvprobe.engine.interventions import KVPatch
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.decisions import decision_rows, prefill_decided
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FROM_DONOR = ("trigger_only", "notes", "full_downstream", "rule_rest", "after_rule")
FROM_OTHER_FIELD = ("other_field_notes",)
FROM_BOTH_CHANGED = ("same_conclusion_notes", "same_conclusion_tokens")
INTERVENTIONS = FROM_DONOR + FROM_OTHER_FIELD + FROM_BOTH_CHANGED


@PROBES.register("dissociation")
class Dissociation(Probe):
    """Whether notes after a rule hold the conclusion or what it was drawn from: the 2x2 of field and trigger."""

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
        prefilled = prefill_pair(subject, pair)
        sources = {name: prefill_decided(subject, pair, prompt) for name, prompt in pair.variants.items()}
        # The conclusion is the donor's where one of field and trigger differs, and the base's where both do.
        right = {
            "donor": prefilled.donor.margin > 0,
            "field_changed": sources["field_changed"][1].margin > 0,
            "both_changed": sources["both_changed"][1].margin < 0,
        }
        caches = {"donor": prefilled.oracle, **{name: cache for name, (cache, _) in sources.items()}}
        patches = [
            ({"intervention": name, "source_right": right[source_of(name)]}, patch)
            for name, patch in interventions(pair, caches).items()
        ]
        return decision_rows(subject, pair, prefilled, patches, self.batch_size)


def interventions(pair: Pair, caches: Mapping[str, KVCache]) -> dict[str, KVPatch]:
    """The patches by name; `caches` are those of the prompts `donor`, `field_changed` and `both_changed`."""
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
