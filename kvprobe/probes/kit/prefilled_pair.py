"""What every probe reads first: both prompts of a pair as the model decides them, and what rounding alone can do."""

from __future__ import annotations

from dataclasses import dataclass

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import Forward, forward, prefill
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.readout import Readout, read, read_rows
from kvprobe.engine.sweep import run_patches
from kvprobe.models.subject import Subject
from kvprobe.probes.gating import gate_columns
from kvprobe.tasks.pairs import Pair


@dataclass(frozen=True, eq=False)
class PrefilledPair:
    """A pair before any intervention.

    Attributes:
        stale: cache of the base prompt.
        oracle: cache of the donor prompt.
        again: cache of the base prompt, prefilled in two pieces.
        base: decision of the base prompt.
        donor: decision of the donor prompt.
        noise_floor: largest difference, in logits, between two ways of computing the same margin.
    """

    stale: KVCache
    oracle: KVCache
    again: KVCache
    base: Readout
    donor: Readout
    noise_floor: float

    def common(self) -> dict[str, float]:
        """The columns that every row of a probe carries for the inclusion gate."""
        return gate_columns(self.base, self.donor, self.noise_floor)


def prefill_pair(subject: Subject, pair: Pair, whole: tuple[Forward, Forward] | None = None) -> PrefilledPair:
    """Prefill both prompts and decide them, each decision in more than one way (critique ME1).

    The base is decided at the end of its prefill, from its cache, and from a cache of the same values prefilled in two
    pieces; the donor in the first two ways.

    Args:
        subject: the model.
        pair: the prompts.
        whole: their prefills, where there are some.
    """
    answers = pair.base_answer_id, pair.donor_answer_id
    stale, oracle = whole or (prefill(subject, pair.base.token_ids), prefill(subject, pair.donor.token_ids))
    again = prefilled_in_two_pieces(subject, pair)
    everything = tuple(range(pair.decision_position))
    same_value = KVPatch(everything, again, no_op=True)
    base, same = read_rows(run_patches(subject, pair.base.token_ids, stale.cache, [(), same_value]), *answers)
    donor = read(run_patches(subject, pair.donor.token_ids, oracle.cache, [()])[0], *answers)
    floor = max(
        abs(base.margin - read(stale.logits, *answers).margin),
        abs(donor.margin - read(oracle.logits, *answers).margin),
        abs(base.margin - same.margin),
    )
    return PrefilledPair(stale.cache, oracle.cache, again, base, donor, floor)


def prefilled_in_two_pieces(subject: Subject, pair: Pair) -> KVCache:
    """The base prompt's cache, computed up to the field's end and then on from there."""
    ids, joint = pair.base.token_ids, pair.field.end
    return forward(subject, ids[joint:], prefill(subject, ids[:joint]).cache).cache
