"""What the inclusion gate reads of a pair."""

from __future__ import annotations

from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.models.subject import Subject
from kvprobe.tasks.pairs import Pair


def gate_columns(base: Readout, donor: Readout, noise_floor: float) -> dict[str, float]:
    """What the inclusion gate reads of a pair: its unedited decisions and the noise of a margin, in logits."""
    return {
        "m_base": base.margin,
        "m_donor": donor.margin,
        "mass_base": base.mass,
        "mass_donor": donor.mass,
        "noise_floor": noise_floor,
    }


def decided(subject: Subject, pair: Pair) -> dict[str, float]:
    """What the inclusion gate reads of a pair, from one prefill of each prompt; the noise is not measured."""
    answers = pair.base_answer_id, pair.donor_answer_id
    base, donor = (read(prefill(subject, prompt.token_ids).logits, *answers) for prompt in (pair.base, pair.donor))
    return gate_columns(base, donor, 0.0)
