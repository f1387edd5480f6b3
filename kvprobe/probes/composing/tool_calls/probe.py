"""Tool definitions compiled apart (protocol 6.6, critique CO1, CO6): is the same call written from them?

A library of tool definitions is compiled once and spliced before a request; the model writes one call, greedily. It is
read as JSON and compared by value (`kvprobe.tasks.calls`): with the right call, and with the one that the model writes
behind a full prefill of the very same tokens. What cannot be read as a call is wrong, and agrees with nothing.

    full_prefill              the definitions run where they stand, as a piece of their own: what rounding does
    splice_none, _neutral, _real   compiled behind nothing (the paper's way), a neutral line, what really precedes them
    seam_N_none, ...          the same, the first N tokens of the definitions run where they stand
    wrong_chunk, removed      floors: the other library, which lacks the tool, compiled behind the neutral line; none

Each arm X has the effects

    X.parsed, X.censored      a call can be read; the limit came first
    X.name_right, X.arguments_right, X.accuracy   the name, all of the arguments, both
    X.agreement, X.same_name, X.same_text, X.kappa   with the full prefill's: the call by value, its name, its
                              very text, the names beyond chance
    seam_gain_none.accuracy, ...   seam_N less splice, for each header
    header_gain.accuracy      splice_neutral less splice_none

The inclusion gate reads calls, not logits: `m_base` and `m_donor` are -1 where the full prefill writes the base's right
call, 1 where it writes the donor's, and 0 where it writes another or none.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pandas as pd
from pydantic import Field

from kvprobe.composing.base import ReuseScheme, make_scheme
from kvprobe.composing.chunk import Chunk, Header, compile_behind
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.composing.tool_calls.written_calls import WrittenCall, rewritten, write_call
from kvprobe.probes.kit.fidelity import paired_difference
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, proportion
from kvprobe.stats.kappa import cohen_kappa
from kvprobe.tasks.calls import Call, find_call
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.tool_calls import TOOLS, right_calls

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

REFERENCE, WRONG, REMOVED = "full_prefill", "wrong_chunk", "removed"
Says = Literal["own", "other", "nothing"]
_SHARES = {
    "parsed": "parsed",
    "censored": "censored",
    "name_right": "name_right",
    "arguments_right": "arguments_right",
    "accuracy": "correct",
    "agreement": "agrees",
    "same_name": "same_name",
    "same_text": "same_text",
}
"""Column of each effect."""


@dataclass(frozen=True, eq=False)
class Arm:
    """A way to have the definitions in the prompt.

    Attributes:
        scheme: how they are put there.
        header: what they were compiled behind.
        says: whose definitions: those of the prompt, of the other library, or none.
    """

    scheme: ReuseScheme
    header: Header
    says: Says = "own"


@PROBES.register("tool_calls")
class ToolCallsProbe(Probe):
    """Calls written from spliced tool definitions against the right ones and a full prefill's, by value."""

    name: ClassVar[str] = "tool_calls"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{REFERENCE}.accuracy": PaperEntry("tool_calling", "full", "function_call_accuracy"),
        "splice_none.accuracy": PaperEntry("tool_calling", "transplant", "function_call_accuracy"),
        "splice_none.same_name": PaperEntry("tool_calling", "transplant_vs_full", "agreement"),
    }
    may_lack: ClassVar[Mapping[str, str]] = {
        "*.kappa": "All calls are to the same tool.",
        f"{WRONG}.*": "No prompt beside has other definitions.",
    }

    class Parameters(base.Parameters):
        """Headers and seam."""

        headers: tuple[Header, ...] = Field(
            ("none", "neutral", "real"), min_length=1, description="what the definitions are compiled behind"
        )
        seam: int = Field(8, ge=1, description="first tokens of the definitions that the seam arms run")
        limit: int = Field(96, ge=1, description="most tokens of a call; a longer one is censored")

    def arms(self) -> dict[str, Arm]:
        """All arms by name."""
        splice, seam = make_scheme("splice"), make_scheme("splice", seam=self.parameters.seam)
        headers = self.parameters.headers
        return {
            REFERENCE: Arm(make_scheme("full_prefill"), "none"),
            **{f"splice_{header}": Arm(splice, header) for header in headers},
            **{f"seam_{self.parameters.seam}_{header}": Arm(seam, header) for header in headers},
            WRONG: Arm(splice, "neutral", "other"),
            REMOVED: Arm(splice, "none", "nothing"),
        }

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each of its two prompts and each arm.

        Raises:
            ConfigError: a pair has no tool definitions or does not say its right calls.
        """
        desk, arms = _Desk(subject, self.parameters.limit), self.arms()
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            right = _right(pair)
            other = next((_tools(each.base) for each in pairs if _tools(each.base) != _tools(pair.base)), ())
            references = [desk.full_prefill(prompt) for prompt in (pair.base, pair.donor)]
            gate = _gate_columns(references, right)
            for prompt, reference, call, name in zip(
                (pair.base, pair.donor), references, right, ("base", "donor"), strict=True
            ):
                shared = {"pair": index, **gate, "prompt": name}
                for arm_name, arm in arms.items():
                    if arm.says != "other" or other:
                        written = desk.composed(prompt, arm, other)
                        rows.append({**shared, "arm": arm_name, **_compared(written, reference, call)})
            progress(index + 1, len(pairs))
        return rows

    def refusal(self, subject: Subject, pair: Pair) -> str | None:
        """A tokenizer whose tokens for the right call do not read back as that call cannot write it."""
        for call in _right(pair):
            read = rewritten(subject.tokenizer, call)
            if find_call(read) != call:
                shown = textwrap.shorten(read, 48, placeholder=" ...")
                return f"Its tokenizer cannot write a tool call; one reads back as {shown}, not that call."
        return None

    def preview(self, subject: Subject, pair: Pair) -> Mapping[str, float]:
        """Both calls behind full prefills."""
        desk = _Desk(subject, self.parameters.limit)
        return _gate_columns([desk.full_prefill(prompt) for prompt in (pair.base, pair.donor)], _right(pair))

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Right calls and agreement of every arm, and what seam and header add."""
        effects: list[Effect] = []
        for arm, part in rows.groupby("arm", sort=False):
            effects += _arm_effects(str(arm), part, statistics)
        gains = {
            f"seam_gain_{header}": (f"seam_{self.parameters.seam}_{header}", f"splice_{header}")
            for header in self.parameters.headers
        }
        gains["header_gain"] = ("splice_neutral", "splice_none")
        for name, arms in gains.items():
            effects += paired_difference(f"{name}.accuracy", rows, "correct", arms, statistics)
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Right calls, right names and agreement of every arm; one column for each model."""
        from kvprobe.probes.composing.tool_calls.figure import draw_tool_calls

        return draw_tool_calls(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Right calls of full prefill, splice, seam and floors, all models."""
        from kvprobe.probes.composing.tool_calls.figure import tool_calls_panel

        tool_calls_panel(axes, panels)


class _Desk:
    """Writes calls; definitions are compiled and placed once, for they and what precedes them are often the same."""

    def __init__(self, subject: Subject, limit: int) -> None:
        self.subject = subject
        self.limit = limit
        self._placed: dict[tuple[Any, ...], KVCache | None] = {}
        self._chunks: dict[tuple[Any, ...], Chunk] = {}

    def full_prefill(self, prompt: TokenizedContext) -> WrittenCall:
        """The call behind one prefill of the whole prompt."""
        return self._write(prompt.token_ids, prefill(self.subject, prompt.token_ids).cache)

    def composed(self, prompt: TokenizedContext, arm: Arm, other: tuple[int, ...]) -> WrittenCall:
        """The call behind the prompt with its definitions put there as the arm does."""
        span = prompt.spans[TOOLS]
        before, rest = prompt.token_ids[: span.start], prompt.token_ids[span.end :]
        held = {"own": _tools(prompt), "other": other, "nothing": ()}[arm.says]
        cache = self._behind(before, held, arm)
        return self._write((*before, *held, *rest), forward(self.subject, rest, cache).cache)

    def _write(self, token_ids: Sequence[int], cache: KVCache) -> WrittenCall:
        return write_call(self.subject, token_ids, cache, limit=self.limit)

    def _behind(self, before: tuple[int, ...], held: tuple[int, ...], arm: Arm) -> KVCache | None:
        """Everything up to the end of the definitions."""
        key = before, held, arm.scheme.name, arm.scheme.parameters.model_dump_json(), arm.header
        if key not in self._placed:
            cache = prefill(self.subject, before).cache if before else None
            if held:
                cache = arm.scheme.place(self.subject, cache, self._chunk(before, held, arm.header)).cache
            self._placed[key] = cache
        return self._placed[key]

    def _chunk(self, before: tuple[int, ...], held: tuple[int, ...], header: Header) -> Chunk:
        if (key := (held, header, before if header == "real" else ())) not in self._chunks:
            self._chunks[key] = compile_behind(self.subject, held, header, before)
        return self._chunks[key]


def _right(pair: Pair) -> Sequence[Call]:
    if TOOLS not in pair.base.spans or "base_call" not in pair.scenario.attributes:
        raise ConfigError("Tool calls need pairs with tool definitions and their right calls: use task tool_calls.")
    return right_calls(pair.scenario.attributes)


def _tools(prompt: TokenizedContext) -> tuple[int, ...]:
    return prompt.token_ids[prompt.spans[TOOLS].start : prompt.spans[TOOLS].end] if TOOLS in prompt.spans else ()


def _gate_columns(references: Sequence[WrittenCall], right: Sequence[Call]) -> dict[str, float]:
    def decision(written: WrittenCall) -> float:
        return float(written.call == right[1]) - float(written.call == right[0])

    return {"m_base": decision(references[0]), "m_donor": decision(references[1]), "noise_floor": 0.0}


def _compared(written: WrittenCall, reference: WrittenCall, right: Call) -> Measurement:
    """One written call beside the right one and the full prefill's."""
    call, ought = written.call, reference.call
    return {
        "parsed": call is not None,
        "censored": written.censored,
        "name_right": call is not None and call.name == right.name,
        "arguments_right": call is not None and call.arguments == right.arguments,
        "correct": call == right,
        "agrees": call is not None and call == ought,
        "same_name": call is not None and ought is not None and call.name == ought.name,
        "same_text": call is not None and written.text == reference.text,
        "called": "" if call is None else call.name,
        "reference_called": "" if ought is None else ought.name,
        "text": written.text,
        "reference_text": reference.text,
        "tokens": written.tokens,
    }


def _arm_effects(name: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    shared: dict[str, Any] = {"clusters": rows[statistics.cluster], "statistics": statistics}
    for effect, column in _SHARES.items():
        yield proportion(f"{name}.{effect}", rows[column].astype(float), **shared)
    if len({*rows["called"], *rows["reference_called"]}) > 1:
        yield cohen_kappa(f"{name}.kappa", rows["called"], rows["reference_called"], **shared)
