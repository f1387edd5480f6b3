"""Time to the first token of a prompt with a long chunk (protocol 6.3, critique CO5).

A chunk of random tokens, and one of plain text, stands between a prompt's opening line and its task. It is compiled
once and serves all pairs. What is timed runs from token ids to the logits of one position, the same for all arms:

    full_prefill       one pass of the model library over the whole prompt, with the attention kernel that it picks
    splice             opening line run, resident chunk moved behind it, task run
    splice_from_disk   the same, the chunk loaded from a skill library first; the system is asked to forget the file
    splice_seam_N      the same with a resident chunk whose first N tokens are run in place
    cacheblend_P       the resident chunk moved, P percent of its tokens run anew
    without_chunk      opening line and task alone in one pass: what full_prefill takes without the chunk
    two_pieces         opening line and task alone in two passes: what composing takes without it

Arms are run in turn, once to warm up and then `repeats` times, and medians are compared. From `long_from` tokens on,
arms that run the whole chunk are not warmed up and run only `long_repeats` times. Compiling and storing are timed too.
Chunks that repeat the entries of the longest one are moved only, up to lengths that cannot be prefilled here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from pydantic import Field

from kvprobe.composing.base import make_scheme
from kvprobe.composing.chunk import Chunk
from kvprobe.engine.forward import clock
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.composing.compose_latency.requests import (
    SKILL,
    Arms,
    Prepared,
    Request,
    forget,
    prefill_flops,
    prepare,
    repeated,
    request_of,
    run_composed,
    run_plain,
)
from kvprobe.probes.kit.fidelity import FULL_PREFILL
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

WITHOUT_CHUNK, TWO_PIECES, COMPILE = "without_chunk", "two_pieces", "compile"
RANDOM, TEXT, REPEATED = "random", "text", "repeated"
"""What a chunk holds; a repeated one has no full prefill to be compared with."""


@PROBES.register("compose_latency")
class ComposeLatency(Probe):
    """Seconds, FLOPs and storage of composing against a full prefill, by the length of the chunk."""

    # A chunk is compiled once for all pairs.
    needs_all_pairs: ClassVar[bool] = True

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

    @property
    def percent(self) -> int:
        """Of the chunk's tokens that the CacheBlend arm recomputes."""
        return round(100 * self.share)

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair, length and kind of text one row for each arm, and one for compiling.

        Raises:
            ConfigError: a prompt has no segment `system` or `task`.
        """
        # Of chunks beyond the model's positions only the cost is read.
        subject = subject.extrapolating()
        rows: list[Measurement] = []
        shared = [{"pair": index, **prefill_pair(subject, pair).common()} for index, pair in enumerate(pairs)]
        requests = [request_of(pair.base) for pair in pairs]
        sizes = [*((RANDOM, length) for length in self.lengths), (TEXT, self.text_length)]
        sizes = [(text, length) for text, length in sizes if self.fits(subject, length)]
        longest: Chunk | None = None
        for done, (text, length) in enumerate(sizes):
            with tempfile.TemporaryDirectory() as folder:
                prepared = prepare(subject, self.chunk_ids(subject, text, length), Path(folder))
                about = {"text": text, "length": length}
                rows.append({**shared[0], **about, "arm": COMPILE, **prepared.columns()})
                for index, request in enumerate(requests):
                    rows += [{**shared[index], **about, **row} for row in self._timed(subject, request, prepared)]
                    progress(done * len(pairs) + index + 1, len(sizes) * len(pairs))
            if text == RANDOM and (longest is None or length > len(longest)):
                longest = prepared.chunk
        if longest is None:
            return rows
        for length in self.repeated_lengths:
            chunk, about = repeated(longest, length), {"text": REPEATED, "length": length}
            for index, request in enumerate(requests):
                moved = self._in_turn(subject, moving_arms(subject, request, chunk), length)
                rows += [{**shared[index], **about, **row} for row in moved]
        return rows

    def arms(self, subject: Subject, request: Request, prepared: Prepared) -> Arms:
        """Every arm by name, as a function that runs it once."""
        chunk, composed = prepared.chunk, partial(run_composed, subject, request)
        splice, seam = make_scheme("splice"), make_scheme("splice", seam=self.seam)
        return {
            FULL_PREFILL: partial(run_plain, subject, (*request.opening, *chunk.token_ids, *request.task)),
            **moving_arms(subject, request, chunk),
            "splice_from_disk": lambda: composed(splice, prepared.library.load(subject, SKILL)),
            f"splice_seam_{self.seam}": partial(composed, seam, chunk),
            f"cacheblend_{self.percent}": partial(composed, make_scheme("cacheblend", share=self.share), chunk),
            WITHOUT_CHUNK: partial(run_plain, subject, (*request.opening, *request.task)),
        }

    def _timed(self, subject: Subject, request: Request, prepared: Prepared) -> Iterator[Measurement]:
        arms, length = self.arms(subject, request, prepared), len(prepared.chunk)
        uncounted = {FULL_PREFILL: len(request) + length, WITHOUT_CHUNK: len(request)}
        for row in self._in_turn(subject, arms, length, prepared.library.path(SKILL)):
            tokens = uncounted.get(row["arm"])
            yield row if tokens is None else {**row, "flops": prefill_flops(subject, tokens)}

    def _in_turn(self, subject: Subject, arms: Arms, length: int, stored: Path | None = None) -> Iterator[Measurement]:
        """Median seconds of every arm, run one after the other again and again."""
        costly = {name for name in arms if name == FULL_PREFILL or name.startswith("cacheblend")}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        work: dict[str, int] = {}
        for number in range(self.repeats + 1):
            for name, run in arms.items():
                if length >= self.long_from and name in costly and not 1 <= number <= self.long_repeats:
                    continue
                if name == "splice_from_disk" and stored is not None:
                    forget(stored)
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
        return heads * length**2 * width <= self.score_bytes

    def chunk_ids(self, subject: Subject, text: str, length: int) -> tuple[int, ...]:
        """`length` tokens: random ones without the special ones, or neutral notes over and over."""
        if text == TEXT:
            notes = encode_segment("".join(f"- {note}\n" for note in filler_notes()), subject.tokenizer)
            return tuple((notes * (length // len(notes) + 1))[:length])
        generator = torch.Generator().manual_seed(self.seed + length)
        plain = sorted(set(range(len(subject.tokenizer))) - set(subject.tokenizer.all_special_ids))
        return tuple(plain[place] for place in torch.randint(len(plain), (length,), generator=generator).tolist())


def moving_arms(subject: Subject, request: Request, chunk: Chunk) -> Arms:
    """Splicing a resident chunk, and the same two passes without it."""
    composed = partial(run_composed, subject, request)
    return {"splice": partial(composed, make_scheme("splice"), chunk), TWO_PIECES: partial(composed, None, None)}
