"""The field alone and growing suffixes of a prompt, patched from the donor (protocol 1.1 f, 1.2, 2.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import Measurement
from kvprobe.probes.kit.decisions import decision_rows
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def suffix(pair: Pair, fraction: float) -> tuple[int, ...]:
    """The last `fraction` of the positions from the field's start up to, not including, the decision token."""
    changed = range(pair.field.start, pair.decision_position)
    # Rounding up, but not for what floating point adds.
    return tuple(changed[-math.ceil(fraction * len(changed) - 1e-9) :])


def measure_dose(
    subject: Subject, pair: Pair, fractions: Sequence[float], batch_size: int | None = None
) -> list[Measurement]:
    """A row for each patch, with its `fraction` of the changed positions.

    `field_only` is the field's own entries, `suffix_5` the last 5% of those from the field to the decision, and
    `full_downstream` all of them; `distance` is that from field to decision in tokens.
    """
    prefilled = prefill_pair(subject, pair)
    field, changed = tuple(pair.field.positions), suffix(pair, 1.0)
    sets = [
        ("field_only", len(field) / len(changed), field),
        *((f"suffix_{round(100 * fraction)}", fraction, suffix(pair, fraction)) for fraction in fractions),
        ("full_downstream", 1.0, changed),
    ]
    distance = pair.decision_position - pair.field.end + 1
    patches = [
        (
            {"intervention": name, "fraction": fraction, "distance": distance},
            # The last few tokens of a prompt may hold nothing of the field, which is a result and no mistake.
            KVPatch(positions, prefilled.oracle, no_op=name.startswith("suffix")),
        )
        for name, fraction, positions in sets
    ]
    return decision_rows(subject, pair, prefilled, patches, batch_size)
