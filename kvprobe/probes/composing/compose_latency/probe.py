"""Time to the first token of a prompt with a long chunk (protocol 6.3, critique CO5).

A chunk of random tokens, and one of plain text, stands between a prompt's opening line and its task. It is compiled
once and serves all pairs. What is timed runs from token ids to the logits of one position, the same for all arms:

    full_prefill       one pass of the model library over the whole prompt, with the attention kernel that it picks
    splice             opening line run, resident chunk moved behind it, task run
    splice_from_disk   the same, the chunk loaded from a skill library first; the system is asked to forget the file
    splice_seam_N      the same with a resident chunk whose first N tokens are run where they stand
    cacheblend_P       the resident chunk moved, P percent of its tokens run anew
    without_chunk      opening line and task alone in one pass: what full_prefill takes without the chunk
    two_pieces         opening line and task alone in two passes: what composing takes without it

Arms are run in turn, once to warm up and then `repeats` times, and medians are compared. From `long_from` tokens on,
arms that run the whole chunk are not warmed up and run only `long_repeats` times. Compiling and storing stand apart.

    arm_L.speedup, .seconds, .flop_share   at a chunk of L tokens; against full_prefill of the same prompt
    arm_text_L.speedup                     the same for plain text
    arm.exponent       growth with its length of what the chunk adds (seconds less those without it, in as many passes)
    arm.exponent_long  the same over chunks of `asymptote_from` tokens and more, where fixed costs of moving weigh less;
                       for splice up to 32k, of chunks that repeat the longest one's entries (`splice_repeated_L`)
    arm.exponent_raw   growth of the whole time, overhead included
    arm.flop_exponent  growth of what the chunk adds to the FLOPs
    full_over_splice.exponent   by how much full_prefill's exponent is larger
    compile_L.seconds, save_L.seconds, storage_L.bytes, pays_off_L.uses   uses after which compiling has paid off
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, ClassVar

import pandas as pd
import torch
from pydantic import Field

from kvprobe.composing.base import ReuseScheme, make_scheme
from kvprobe.composing.chunk import Chunk, Header, beginning_of_text, precompile
from kvprobe.composing.library import SkillLibrary
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import clock, flops, forward, logits_of
from kvprobe.engine.masks import plan_masks
from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.models.caching import empty_cache
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.composing.compose_latency.effects import (
    COMPILE,
    OVERHEAD,
    REFERENCE,
    REPEATED,
    TWO_PIECES,
    latency_effects,
)
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.context import TokenizedContext, encode_segment
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from kvprobe.models.subject import Subject

SKILL = "chunk"
Run = Callable[[], tuple["Tensor", int]]
"""One run of an arm: logits `[vocab]` and FLOPs."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A chunk, compiled and stored.

    Attributes:
        seconds: compiling it, and storing it.
        nbytes: of its file.
    """

    chunk: Chunk
    library: SkillLibrary
    seconds: tuple[float, float]
    nbytes: int


@dataclass(frozen=True, eq=False)
class Request:
    """What stands around the chunk, as token ids."""

    opening: tuple[int, ...]
    task: tuple[int, ...]


@PROBES.register("compose_latency")
class ComposeLatency(Probe):
    """Seconds, FLOPs and storage of composing against a full prefill, by the length of the chunk."""

    name: ClassVar[str] = "compose_latency"
    # A chunk is compiled once for all pairs.
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"splice_{ours}.speedup": PaperEntry("ttft_by_length", f"L{theirs}", "speedup")
        for ours, theirs in ((512, 500), (2048, 2000), (8192, 8000))
    }
    may_lack: ClassVar[Mapping[str, str]] = {
        "*_[0-9]*.*": "Its eager attention holds the scores of all pairs of tokens: more than `score_bytes` at that "
        "length.",
        "pays_off_*": "Composing took no less than a full prefill, so compiling never pays off.",
        "*.exponent*": "A chunk added no time at too many of the lengths.",
    }

    class Parameters(base.Parameters):
        """Lengths and repetitions."""

        lengths: tuple[Annotated[int, Field(ge=16)], ...] = Field(
            (512, 1024, 2048, 4096, 8192), min_length=2, description="tokens of the chunks of random tokens"
        )
        repeated_lengths: tuple[Annotated[int, Field(ge=16)], ...] = Field(
            (16384, 32768), description="tokens of chunks made of the longest one's entries over and over, to be moved"
        )
        text_length: int = Field(2048, ge=16, description="tokens of the chunk of plain text")
        seam: int = Field(8, ge=1, description="first tokens of the chunk that the seam arm runs")
        share: float = Field(0.15, gt=0, le=1, description="of the chunk's tokens that the CacheBlend arm recomputes")
        repeats: int = Field(9, ge=1, description="timed runs of each arm")
        long_from: int = Field(4096, ge=16, description="tokens from which on long arms are run less often")
        long_repeats: int = Field(1, ge=1, description="timed runs of arms that run the whole chunk, from there on")
        asymptote_from: int = Field(4096, ge=16, description="shortest chunk that the long exponents are fitted over")
        score_bytes: int = Field(2**27, ge=1, description="most bytes of one layer's scores under eager attention")
        seed: int = Field(0, ge=0, description="of the random tokens")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair, length and kind of text one row for each arm, and one for compiling.

        Raises:
            ConfigError: a prompt has no segment `system` or `task`.
        """
        own, rows = self.parameters, []
        shared = [{"pair": index, **prefill_pair(subject, pair).common()} for index, pair in enumerate(pairs)]
        requests = [request_of(pair.base) for pair in pairs]
        sizes = [*(("random", length) for length in own.lengths), ("text", own.text_length)]
        sizes = [(text, length) for text, length in sizes if self.fits(subject, length)]
        longest: Chunk | None = None
        for done, (text, length) in enumerate(sizes):
            with tempfile.TemporaryDirectory() as folder:
                prepared = _prepare(subject, self.chunk_ids(subject, text, length), Path(folder))
                about = {"text": text, "length": length}
                rows.append({**shared[0], **about, "arm": COMPILE, **_compile_columns(prepared)})
                for index, request in enumerate(requests):
                    rows += [{**shared[index], **about, **row} for row in self._timed(subject, request, prepared)]
                    progress(done * len(pairs) + index + 1, len(sizes) * len(pairs))
            if text == "random" and (longest is None or length > len(longest)):
                longest = prepared.chunk
        if longest is not None:
            rows += self._moved(subject, requests, shared, longest)
        return rows

    def _moved(
        self, subject: Subject, requests: Sequence[Request], shared: Sequence[Measurement], longest: Chunk
    ) -> Iterator[Measurement]:
        """Splicing of chunks too long to prefill here; how long moving takes does not depend on what is moved."""
        for length in self.parameters.repeated_lengths:
            chunk = repeated(longest, length)
            for index, request in enumerate(requests):
                arms = _moving_arms(subject, request, chunk)
                for row in self._in_turn(subject, arms, length):
                    yield {**shared[index], "text": REPEATED, "length": length, **row}

    def arms(self, subject: Subject, request: Request, prepared: Prepared) -> dict[str, Run]:
        """Every arm by name, as a function that runs it once."""
        own, splice = self.parameters, make_scheme("splice")
        whole = (*request.opening, *prepared.chunk.token_ids, *request.task)
        composed = partial(_composed, subject, request)
        return {
            REFERENCE: partial(_plain, subject, whole),
            **_moving_arms(subject, request, prepared.chunk),
            "splice_from_disk": lambda: composed(splice, prepared.library.load(subject, SKILL)),
            f"splice_seam_{own.seam}": lambda: composed(make_scheme("splice", seam=own.seam), prepared.chunk),
            f"cacheblend_{round(100 * own.share)}": lambda: composed(
                make_scheme("cacheblend", share=own.share), prepared.chunk
            ),
            OVERHEAD: partial(_plain, subject, (*request.opening, *request.task)),
        }

    def _timed(self, subject: Subject, request: Request, prepared: Prepared) -> Iterator[Measurement]:
        arms = self.arms(subject, request, prepared)
        around = len(request.opening) + len(request.task)
        uncounted = {REFERENCE: around + len(prepared.chunk), OVERHEAD: around}
        for row in self._in_turn(subject, arms, len(prepared.chunk), prepared.library.path(SKILL)):
            tokens = uncounted.get(row["arm"])
            yield row if tokens is None else {**row, "flops": _prefill_flops(subject, tokens)}

    def _in_turn(
        self, subject: Subject, arms: Mapping[str, Run], length: int, stored: Path | None = None
    ) -> Iterator[Measurement]:
        """Median seconds of every arm, run one after the other again and again."""
        own = self.parameters
        costly = {name for name in arms if name == REFERENCE or name.startswith("cacheblend")}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        work: dict[str, int] = {}
        for number in range(own.repeats + 1):
            for name, run in arms.items():
                if length >= own.long_from and name in costly and not 1 <= number <= own.long_repeats:
                    continue
                if name == "splice_from_disk" and stored is not None:
                    _forget(stored)
                started = clock(subject)
                work[name] = run()[1]
                elapsed = clock(subject) - started
                if number:
                    seconds[name].append(elapsed)
        for name in arms:
            yield {"arm": name, "seconds": median(seconds[name]), "runs": len(seconds[name]), "flops": work[name]}

    def fits(self, subject: Subject, length: int) -> bool:
        """Whether one layer's attention scores at this length may be held, where the kernel holds them."""
        if subject.identity.attention != "eager":
            return True
        heads, width = int(subject.config.num_attention_heads), torch.finfo(subject.dtype).bits // 8
        return heads * length**2 * width <= self.parameters.score_bytes

    def chunk_ids(self, subject: Subject, text: str, length: int) -> tuple[int, ...]:
        """`length` tokens: random ones without the special ones, or neutral notes over and over."""
        if text == "text":
            notes = encode_segment("".join(f"- {note}\n" for note in filler_notes()), subject.tokenizer)
            return tuple((notes * (length // len(notes) + 1))[:length])
        generator = torch.Generator().manual_seed(self.parameters.seed + length)
        plain = sorted(set(range(len(subject.tokenizer))) - set(subject.tokenizer.all_special_ids))
        return tuple(plain[place] for place in torch.randint(len(plain), (length,), generator=generator).tolist())

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Speed-ups, seconds and FLOPs by length, exponents, and what compiling costs."""
        return latency_effects(rows, statistics, self.parameters.asymptote_from)

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Seconds and speed-up over the length; one column for each model."""
        from kvprobe.probes.composing.compose_latency.figure import draw_compose_latency

        return draw_compose_latency(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Speed-up of a resident and of a stored chunk over the length, all models."""
        from kvprobe.probes.composing.compose_latency.figure import compose_latency_panel

        compose_latency_panel(axes, panels)


def request_of(prompt: TokenizedContext) -> Request:
    """The prompt up to its opening line, and from its task on.

    Raises:
        ConfigError: it has no such segments.
    """
    missing = [name for name in ("system", "task") if name not in prompt.spans]
    if missing:
        raise ConfigError(f"Composing latency needs prompts with a segment {missing[0]!r}: use task gated_decision.")
    return Request(prompt.token_ids[: prompt.spans["system"].end], prompt.token_ids[prompt.spans["task"].start :])


def repeated(chunk: Chunk, length: int) -> Chunk:
    """`length` tokens of a chunk over and over, its entries at positions one after the other."""
    times = -(-length // len(chunk))
    places = torch.arange(length)

    def over(tensor: Tensor) -> Tensor:
        return tensor.repeat(1, 1, times, 1)[:, :, :length].contiguous()

    layers = [(over(layer.keys), over(layer.values)) for layer in chunk.cache.layers]
    return Chunk((chunk.token_ids * times)[:length], KVCache.computed(layers, places), chunk.header)


def _moving_arms(subject: Subject, request: Request, chunk: Chunk) -> dict[str, Run]:
    composed, splice = partial(_composed, subject, request), make_scheme("splice")
    return {"splice": lambda: composed(splice, chunk), TWO_PIECES: lambda: composed(None, chunk)}


def _prepare(subject: Subject, ids: Sequence[int], folder: Path) -> Prepared:
    header: Header = "bos" if beginning_of_text(subject.tokenizer) else "neutral"
    started = clock(subject)
    chunk = precompile(subject, ids, header)
    compiled = clock(subject)
    library = SkillLibrary(folder)
    path = library.save(subject, SKILL, chunk)
    return Prepared(chunk, library, (compiled - started, time.perf_counter() - compiled), path.stat().st_size)


def _compile_columns(prepared: Prepared) -> Measurement:
    compiling, saving = prepared.seconds
    flop_count = prepared.chunk.receipt.flops
    return {"seconds": compiling, "save_seconds": saving, "bytes": prepared.nbytes, "runs": 1, "flops": flop_count}


def _plain(subject: Subject, ids: Sequence[int]) -> tuple[Tensor, int]:
    """One pass without a mask of ours, so that the model library may pick its fastest kernel; FLOPs are not counted."""
    with torch.no_grad():
        output = subject.model(
            torch.tensor([ids], device=subject.device),
            past_key_values=empty_cache(),
            use_cache=True,
            logits_to_keep=1,
        )
    return logits_of(output, subject)[0], 0


def _composed(subject: Subject, request: Request, scheme: ReuseScheme | None, chunk: Chunk) -> tuple[Tensor, int]:
    """The task runs in one pass, its last token included, as it does in a full prefill; no scheme places no chunk."""
    before = forward(subject, request.opening)
    cache, work = before.cache, before.receipt.flops
    if scheme is not None:
        placed = scheme.place(subject, cache, chunk)
        cache, work = placed.cache, work + placed.receipt.flops
    after = forward(subject, request.task, cache)
    return after.logits, work + after.receipt.flops


def _prefill_flops(subject: Subject, tokens: int) -> int:
    places = torch.arange(tokens)
    plan = plan_masks(subject, places, places, torch.ones(tokens, tokens, dtype=torch.bool).tril())
    return flops(subject, tokens, plan.attended, tokens)


def _forget(path: Path) -> None:
    """Ask the system to drop the file from memory, so that loading reads the disk; not every system does."""
    if not hasattr(os, "posix_fadvise"):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
