"""What the inclusion gate reads of a pair, and which effects are left where no decision turns."""

from __future__ import annotations

from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.models.subject import Subject
from kvprobe.stats import Effect
from kvprobe.stats.proportions import EXACT_SHARE, WILSON
from kvprobe.tasks.pairs import Pair

_SHARES_OF_MARGINS = ("half_shift_rate", "reach_rate", "bit_equal")
"""Metrics that are shares of rows, told by how far a margin moved and not by which side of 0 it lies on."""
_BY_DECISIONS = ("accuracy", "difference", "drop", "exact_match", "prevented")
"""Metrics of differences between shares of decisions."""


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


def about_decisions(effect: Effect) -> bool:
    """Whether an effect tells which answer is decided for: it means nothing where no decision turns."""
    share = effect.method in (WILSON, EXACT_SHARE) and effect.metric not in _SHARES_OF_MARGINS
    return share or effect.unit == "kappa" or effect.metric in _BY_DECISIONS
