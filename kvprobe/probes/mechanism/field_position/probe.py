"""Field position (protocol 1.2, critique ME2): does the field act for itself when it stands near the decision?

The task `field_position` crosses where the session block stands (before or after the rule), how many neutral notes the
prompt has, and how many of them name the field. In every cell of this design the field alone and growing suffixes are
patched from the donor. On a model with sliding windows, `inside_window` says whether the decision token itself can see
the field in a sliding layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress, Share
from kvprobe.probes.kit.doses import FRACTIONS, measure_dose
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

SLOTS = ("start", "after_policy", "after_filler", "end")


@PROBES.register("field_position")
class FieldPositionProbe(Probe):
    """What the field's own entries do, by its place, its distance from the decision and how often it is named."""

    fractions: tuple[Share, ...] = Field(default=FRACTIONS, min_length=1, description="of the changed positions")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each patch, with the pair's cell.

        Raises:
            ConfigError: the pairs are not of the task `field_position`.
        """
        window = subject.architecture.window(subject.config)
        rows = []
        for index, pair in enumerate(pairs):
            cell = _cell(pair)
            for row in measure_dose(subject, pair, self.fractions, self.batch_size):
                sees = None if window is None else row["distance"] < window
                rows.append({"pair": index, **cell, **row, "window": window, "inside_window": sees})
            progress(index + 1, len(pairs))
        return rows


def _cell(pair: Pair) -> Measurement:
    attributes = pair.scenario.attributes
    missing = [key for key in ("scenario", "slot", "notes", "mentions") if key not in attributes]
    if missing:
        raise ConfigError(f"The probe field_position needs pairs that say their {missing[0]}: use task field_position.")
    return {
        "scenario": int(attributes["scenario"]),
        "slot": attributes["slot"],
        "slot_order": SLOTS.index(attributes["slot"]),
        "notes": int(attributes["notes"]),
        "mentions": int(attributes["mentions"]),
    }
