"""Facts spliced early or late in a prompt (protocol 6.5, critique CO1, CO6): is the one asked for still found?

A list of facts is compiled separately and spliced right after the opening line (early) or right before the question
(late). Both prompts of a pair are decided by one full prefill and by composing the very same tokens. A greedy answer is
right when it is the one word that goes with the value asked for, out of the whole vocabulary; agreement compares
answers, right or wrong.

    splice_none, splice_neutral   the list compiled behind nothing (the paper's way) and behind a neutral line
    seam_N                        as splice_none, its first N tokens run in place
    removed                       floor: no list
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from kvprobe.composing.base import make_scheme
from kvprobe.composing.prompts import compile_segment, composition_of
from kvprobe.edit.base import CachedPrompt
from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.fidelity import FULL_PREFILL, REMOVED, ReuseArm, reference_of
from kvprobe.tasks.facts import FACTS
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@PROBES.register("facts")
class FactsProbe(Probe):
    """Answers from a spliced list of facts against a full prefill's, the list early or late."""

    seam: int = Field(8, ge=1, description="first tokens of the list that the seam arm runs")
    equivalence: float = Field(0.1, gt=0, description="share of the mean margin that counts as no difference")

    def arms(self) -> list[ReuseArm]:
        """All arms, the floor last."""
        splice, seam = make_scheme("splice"), make_scheme("splice", seam=self.seam)
        return [
            ReuseArm("splice_none", splice),
            ReuseArm("splice_neutral", splice, "neutral"),
            ReuseArm("seam_{seam}", seam, sizes={"seam": self.seam}),
            ReuseArm(REMOVED, make_scheme(FULL_PREFILL), content="nothing"),
        ]

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each of its two prompts and each arm.

        Raises:
            ConfigError: a pair has no list or does not say where it stands.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            rows += [{"pair": index, **row} for row in self._pair_rows(subject, pair)]
            progress(index + 1, len(pairs))
        return rows

    def _pair_rows(self, subject: Subject, pair: Pair) -> Iterator[Measurement]:
        if FACTS not in pair.base.spans or "insertion" not in pair.scenario.attributes:
            raise ConfigError("The probe facts needs pairs with a list of facts: use task facts.")
        answers = pair.base_answer_id, pair.donor_answer_id
        results = [prefill(subject, prompt.token_ids) for prompt in (pair.base, pair.donor)]
        base, donor = (
            reference_of(subject, pair, donor=bool(side), logits=result.logits) for side, result in enumerate(results)
        )
        from_cache = CachedPrompt(pair.base.token_ids, pair.base.spans, results[0].cache.take(slice(0, -1)))
        again = read(from_cache.decide(subject).logits, *answers)
        shared = {
            **gate_columns(base.reading, donor.reading, abs(again.margin - base.reading.margin)),
            "insertion": pair.scenario.attributes["insertion"],
            "scenario": pair.scenario.attributes["scenario"],
        }
        # The list comes before the field and is the same in both prompts.
        chunks = {arm.header: compile_segment(subject, pair.base, FACTS, arm.header) for arm in self.arms()}
        for reference, right in zip((base, donor), answers, strict=True):
            own = {"reference_exact": int(reference.logits.argmax()) == right}
            for arm in self.arms():
                removed = arm.content == "nothing"
                held = {} if removed else {FACTS: chunks[arm.header]}
                composition = composition_of(reference.prompt, held, without=[FACTS] if removed else [])
                logits = arm.scheme.compose(subject, composition).decide(subject).logits
                exact = int(logits.argmax()) == right
                yield {**shared, **own, "arm": arm.name, **reference.compare(logits), "exact": exact}
