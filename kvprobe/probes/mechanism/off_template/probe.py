"""Off-template prompts (protocol 2.5, family E): does the finding hold beyond the gated decision?

The field alone, growing suffixes, and everything from the field on are patched from the donor, on prompts of another
kind: a two-hop question (task `two_hop`), a free conversation (`conversation`), and an attribute lookup (`lookup`),
where the field is nearly the answer and so may act for itself. Effects are named by the template, which the task
gives: `two_hop.field_only.recovery`, `lookup.suffix_10.recovery`; pairs of a task that names none are `own`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from kvprobe.probes.base import PROBES, Measurement, Probe, Progress, Share
from kvprobe.probes.kit.doses import measure_dose
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@PROBES.register("off_template")
class OffTemplate(Probe):
    """The field alone and growing suffixes on two-hop questions, free conversation and attribute lookup."""

    fractions: tuple[Share, ...] = Field(
        default=(0.05, 0.1, 0.2, 0.3, 0.5), min_length=1, description="of the changed positions"
    )
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each patch."""
        rows = []
        for index, pair in enumerate(pairs):
            template = pair.scenario.attributes.get("template", "own")
            dose = measure_dose(subject, pair, self.fractions, self.batch_size)
            rows += [{"pair": index, "template": template, **row} for row in dose]
            progress(index + 1, len(pairs))
        return rows
