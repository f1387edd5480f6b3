"""Tool definitions compiled apart (protocol 6.6, critique CO1, CO6): is the same call written from them?

A library of tool definitions is compiled once and spliced before a request; the model writes one call, greedily. It is
read as JSON and compared by value (`kvprobe.tasks.calls`): with the right call, and with the one that the model writes
after a full prefill of the very same tokens. Text that cannot be read as a call is wrong and agrees with nothing.

    full_prefill              the definitions run in place, as a piece of their own: what rounding does
    splice_none, _neutral, _real   compiled behind nothing (the paper's way), a neutral line, what really precedes them
    seam_N_none, ...          the same, the first N tokens of the definitions run in place
    wrong_chunk, removed      floors: the other library, which lacks the tool, compiled behind the neutral line; none

The inclusion gate reads calls, not logits: `m_base` and `m_donor` are -1 where the full prefill writes the base's right
call, 1 where it writes the donor's, and 0 where it writes another or none.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from kvprobe.composing.base import make_scheme
from kvprobe.composing.chunk import Header
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.composing.tool_calls.written_calls import WrittenCall, rewritten, write_call
from kvprobe.probes.kit.fidelity import FULL_PREFILL, REMOVED, WRONG, ChunkStore, ReuseArm
from kvprobe.tasks.calls import Call, find_call
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.tool_calls import TOOLS, right_calls

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@PROBES.register("tool_calls")
class ToolCallsProbe(Probe):
    """Calls written from spliced tool definitions against the right ones and a full prefill's, by value."""

    headers: tuple[Header, ...] = Field(
        ("none", "neutral", "real"), min_length=1, description="what the definitions are compiled behind"
    )
    seam: int = Field(8, ge=1, description="first tokens of the definitions that the seam arms run")
    limit: int = Field(96, ge=1, description="maximum tokens of a call; longer ones are censored")

    def arms(self) -> list[ReuseArm]:
        """All arms, the floors last."""
        splice, seam, sizes = make_scheme("splice"), make_scheme("splice", seam=self.seam), {"seam": self.seam}
        return [
            ReuseArm(FULL_PREFILL, make_scheme(FULL_PREFILL)),
            *(ReuseArm(f"splice_{header}", splice, header) for header in self.headers),
            *(ReuseArm(f"seam_{{seam}}_{header}", seam, header, sizes=sizes) for header in self.headers),
            ReuseArm(WRONG, splice, "neutral", "other"),
            ReuseArm(REMOVED, splice, content="nothing"),
        ]

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each of its two prompts and each arm.

        Raises:
            ConfigError: a pair has no tool definitions or does not say its right calls.
        """
        desk = _Desk(subject, self.limit)
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            right, prompts = _right_calls(pair), (pair.base, pair.donor)
            other = next((_tools(each.base) for each in pairs if _tools(each.base) != _tools(pair.base)), ())
            references = [desk.after_prefill(prompt) for prompt in prompts]
            gate = _gate_columns(references, right)
            for side, prompt, reference, call in zip(("base", "donor"), prompts, references, right, strict=True):
                for arm in self.arms():
                    if arm.content != "other" or other:
                        compared = _compared(desk.composed(prompt, arm, other), reference, call)
                        rows.append({"pair": index, **gate, "prompt": side, "arm": arm.name, **compared})
            progress(index + 1, len(pairs))
        return rows

    def refusal(self, subject: Subject, pair: Pair) -> str | None:
        """A tokenizer whose tokens for the right call do not read back as that call cannot write it."""
        for call in _right_calls(pair):
            read = rewritten(subject.tokenizer, call)
            if find_call(read) != call:
                shown = textwrap.shorten(read, 48, placeholder=" ...")
                return f"Its tokenizer cannot write a tool call; one reads back as {shown}, not that call."
        return None

    def preview(self, subject: Subject, pair: Pair) -> Mapping[str, float]:
        """Both calls written after full prefills."""
        desk = _Desk(subject, self.limit)
        return _gate_columns([desk.after_prefill(prompt) for prompt in (pair.base, pair.donor)], _right_calls(pair))


class _Desk:
    """Writes calls; definitions, and what precedes them, are often the same, so they are compiled and placed once."""

    def __init__(self, subject: Subject, limit: int) -> None:
        self.subject = subject
        self.limit = limit
        self._chunks = ChunkStore(subject)
        self._placed: dict[tuple[tuple[int, ...], tuple[int, ...], str], KVCache | None] = {}

    def after_prefill(self, prompt: TokenizedContext) -> WrittenCall:
        """The call written after one prefill of the whole prompt."""
        return self._write(prompt.token_ids, prefill(self.subject, prompt.token_ids).cache)

    def composed(self, prompt: TokenizedContext, arm: ReuseArm, other: tuple[int, ...]) -> WrittenCall:
        """The call written after the prompt with its definitions put there as the arm does."""
        span = prompt.spans[TOOLS]
        before, rest = prompt.token_ids[: span.start], prompt.token_ids[span.end :]
        held = {"own": _tools(prompt), "other": other, "nothing": ()}[arm.content]
        cache = self._up_to_definitions(before, held, arm)
        return self._write((*before, *held, *rest), forward(self.subject, rest, cache).cache)

    def _write(self, token_ids: Sequence[int], cache: KVCache) -> WrittenCall:
        return write_call(self.subject, token_ids, cache, limit=self.limit)

    def _up_to_definitions(self, before: tuple[int, ...], held: tuple[int, ...], arm: ReuseArm) -> KVCache | None:
        key = before, held, arm.name
        if key not in self._placed:
            cache = prefill(self.subject, before).cache if before else None
            if held:
                cache = arm.scheme.place(self.subject, cache, self._chunks.chunk(held, arm.header, before)).cache
            self._placed[key] = cache
        return self._placed[key]


def _right_calls(pair: Pair) -> Sequence[Call]:
    if TOOLS not in pair.base.spans or "base_call" not in pair.scenario.attributes:
        raise ConfigError("Tool calls need pairs with tool definitions and their right calls: use task tool_calls.")
    return right_calls(pair.scenario.attributes)


def _tools(prompt: TokenizedContext) -> tuple[int, ...]:
    return prompt.token_ids[prompt.spans[TOOLS].start : prompt.spans[TOOLS].end] if TOOLS in prompt.spans else ()


def _gate_columns(references: Sequence[WrittenCall], right: Sequence[Call]) -> dict[str, float]:
    base, donor = (float(written.call == right[1]) - float(written.call == right[0]) for written in references)
    return {"m_base": base, "m_donor": donor, "noise_floor": 0.0}


def _compared(written: WrittenCall, reference: WrittenCall, right: Call) -> Measurement:
    """One written call beside the right one and the full prefill's."""
    call, expected = written.call, reference.call
    return {
        "parsed": call is not None,
        "censored": written.censored,
        "name_right": call is not None and call.name == right.name,
        "arguments_right": call is not None and call.arguments == right.arguments,
        "correct": call == right,
        "agrees": call is not None and call == expected,
        "same_name": call is not None and expected is not None and call.name == expected.name,
        "same_text": call is not None and written.text == reference.text,
        "called": "" if call is None else call.name,
        "reference_called": "" if expected is None else expected.name,
        "text": written.text,
        "reference_text": reference.text,
        "tokens": written.tokens,
    }
