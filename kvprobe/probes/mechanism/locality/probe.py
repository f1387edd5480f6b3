"""Locality (protocol 1.1 a, b): does a changed field act from its own cache entries or from those after it?

Base and donor prompt differ in the field alone, so every cache entry that differs lies in the field or after it. The
field's entries and those after it ("the rest": what the model noted about the field while it read on) are
patched from the donor's cache, each alone and both together, and the decision is read with the last token run again.

    field_only        the field from the donor, the rest stale
    downstream_only   the rest from the donor, the field stale
    full_downstream   both: equal to the donor by construction, so it checks the implementation
    no_op             the base's own entries patched onto itself: changes nothing, bit for bit
    same_value        entries of the base prompt prefilled in two pieces: what rounding alone can do

Field and rest need not add up, so their interaction and the Shapley split are reported too (critique ME1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import prefill
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.readout import read, read_rows
from kvprobe.engine.sweep import run_patches
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.cache_change import change_by_layer
from kvprobe.probes.kit.decisions import decision_row
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefilled_in_two_pieces
from kvprobe.tasks.context import Span
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

INTERVENTIONS = ("field_only", "downstream_only", "full_downstream", "no_op", "same_value")


@PROBES.register("locality")
class Locality(Probe):
    """Where a changed field acts from: its own cache entries, or the notes written after it."""

    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each intervention, and one for each region and layer with the cache's change."""
        rows = []
        for index, pair in enumerate(pairs):
            rows += [{"pair": index, **row} for row in self._measure_pair(subject, pair)]
            progress(index + 1, len(pairs))
        return rows

    def _measure_pair(self, subject: Subject, pair: Pair) -> list[Measurement]:
        answers = pair.base_answer_id, pair.donor_answer_id
        stale, oracle = (prefill(subject, context.token_ids) for context in (pair.base, pair.donor))
        again = prefilled_in_two_pieces(subject, pair)
        patches = interventions(pair, stale.cache, oracle.cache, again)
        logits = run_patches(subject, pair.base.token_ids, stale.cache, [(), *patches.values()], self.batch_size)
        base, *edited = read_rows(logits, *answers)
        donor = read(run_patches(subject, pair.donor.token_ids, oracle.cache, [()], self.batch_size)[0], *answers)
        readings = dict(zip(patches, edited, strict=True))
        floor = max(
            abs(base.margin - read(stale.logits, *answers).margin),
            abs(donor.margin - read(oracle.logits, *answers).margin),
            abs(base.margin - readings["same_value"].margin),
        )
        common = PrefilledPair(stale.cache, oracle.cache, again, base, donor, floor).common()
        decisions = [
            decision_row(name, base, reading, len(patches[name].positions)) for name, reading in readings.items()
        ]
        regions = {"before": Span(0, pair.field.start), "field": pair.field, "downstream": pair.downstream}
        return [{**common, **row} for row in decisions + change_by_layer(stale.cache, oracle.cache, regions)]


def interventions(pair: Pair, stale: KVCache, oracle: KVCache, again: KVCache) -> dict[str, KVPatch]:
    """The patches by name; `again` is another prefill of the base prompt."""
    field, rest = tuple(pair.field.positions), tuple(pair.downstream.positions)
    return {
        "field_only": KVPatch(field, oracle),
        "downstream_only": KVPatch(rest, oracle),
        "full_downstream": KVPatch(field + rest, oracle),
        "no_op": KVPatch(field + rest, stale, no_op=True),
        "same_value": KVPatch(field + rest, again, no_op=True),
    }
