"""Latency of edits against the length of the prompt (protocol 5.7).

Neutral notes lengthen each prompt after its rule. The old prompt's cache is there already; what is timed is the work of
the edit and the decision token, for every arm with the same logits (one position). Each arm is run once to warm up and
then `repeats` times, arms in turn, and its median is divided by the median of the full reprefill of the same prompt in
the same run. FLOPs and tokens are shares of that reprefill's too; they do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from kvprobe.edit.base import CachedPrompt
from kvprobe.engine.forward import clock
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.edit_arms import Arm, make_arm
from kvprobe.probes.kit.edit_cases import EditCase, edit_case
from kvprobe.tasks.context import Span, encode_segment
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import WORDINGS

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

ARMS = ("field_only", "erratum", "field_and_erratum", "cacheblend", "hoist_to_end", "full_downstream")
"""Arms beside the full reprefill."""
REFERENCE = "full_reprefill"


@PROBES.register("edit_latency")
class EditLatency(Probe):
    """Seconds, FLOPs and tokens of each edit as a share of a full reprefill, by the length of the prompt."""

    lengths: tuple[PositiveInt, ...] = Field((128, 256, 512, 1024), min_length=2, description="tokens of the prompts")
    repeats: int = Field(5, ge=1, description="timed runs of each arm")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair and length one row for each arm.

        Raises:
            ConfigError: a pair does not say its entity, field and new value.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            case = edit_case(subject, pair)
            for length in self.lengths:
                stale = lengthened(subject, case, length)
                rows += [
                    {"pair": index, "length": length, **case.common(), **row}
                    for row in _timed(subject, case, stale, self.repeats)
                ]
            progress(index + 1, len(pairs))
        return rows


def lengthened(subject: Subject, case: EditCase, length: int) -> CachedPrompt:
    """The case's stale prompt with neutral notes put before its task until it has `length` tokens (or more)."""
    prompt = case.stale
    style, at = WORDINGS.get(case.pair.scenario.wording)(), prompt.span(case.edit.insert_before).start
    notes = filler_notes()
    added: list[int] = []
    while len(prompt.token_ids) + len(added) < length:
        added += encode_segment(style.filler([notes[len(added) % len(notes)]]), subject.tokenizer)
    ids = (*prompt.token_ids[:at], *added, *prompt.token_ids[at:])
    spans = {
        name: Span(span.start + len(added), span.end + len(added)) if span.start >= at else span
        for name, span in prompt.spans.items()
    }
    return CachedPrompt.prefilled(subject, ids, spans)


def _timed(subject: Subject, case: EditCase, stale: CachedPrompt, repeats: int) -> Iterator[Measurement]:
    arms = [make_arm(name, name) for name in (*ARMS, REFERENCE)]
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    flops = {arm.name: _run(subject, case, stale, arm)[1] for arm in arms}
    for _ in range(repeats):
        for arm in arms:
            seconds[arm.name].append(_run(subject, case, stale, arm)[0])
    whole_time, whole_flops = median(seconds[REFERENCE]), flops[REFERENCE]
    whole_tokens = arms[-1].method.tokens(stale, case.edit) + 1
    for arm in arms:
        yield {
            "arm": arm.name,
            "prompt_tokens": len(stale.token_ids),
            "seconds": median(seconds[arm.name]),
            "seconds_ratio": median(seconds[arm.name]) / whole_time,
            "flop_share": flops[arm.name] / whole_flops,
            "token_share": (arm.method.tokens(stale, case.edit) + 1) / whole_tokens,
        }


def _run(subject: Subject, case: EditCase, stale: CachedPrompt, arm: Arm) -> tuple[float, int]:
    """Seconds and FLOPs of one edit and its decision."""
    started = clock(subject)
    edited = arm.method.apply(subject, stale, case.edit)
    decision = edited.prompt.decide(subject)
    return clock(subject) - started, edited.receipt.flops + decision.receipt.flops
