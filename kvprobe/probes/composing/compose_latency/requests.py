"""What is timed: a request around a chunk, the chunk compiled and stored, and single runs to the first token."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvprobe.composing.base import ReuseScheme
from kvprobe.composing.chunk import Chunk, Header, beginning_of_text, precompile
from kvprobe.composing.library import SkillLibrary
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import clock, flops, forward, logits_of
from kvprobe.engine.masks import plan_masks
from kvprobe.errors import ConfigError
from kvprobe.models.caching import empty_cache
from kvprobe.probes.base import Measurement
from kvprobe.tasks.context import TokenizedContext

if TYPE_CHECKING:
    from torch import Tensor

    from kvprobe.models.subject import Subject

SKILL = "chunk"
Run = Callable[[], tuple["Tensor", int]]
"""One run of an arm: logits `[vocab]` and FLOPs."""
Arms = Mapping[str, Run]


@dataclass(frozen=True, eq=False)
class Request:
    """What stands around the chunk, as token ids."""

    opening: tuple[int, ...]
    task: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.opening) + len(self.task)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A chunk, compiled and stored.

    Attributes:
        compiling: seconds.
        saving: seconds.
        nbytes: of its file.
    """

    chunk: Chunk
    library: SkillLibrary
    compiling: float
    saving: float
    nbytes: int

    def columns(self) -> Measurement:
        """What a chunk costs once."""
        work = self.chunk.receipt.flops
        return {"seconds": self.compiling, "save_seconds": self.saving, "bytes": self.nbytes, "runs": 1, "flops": work}


def request_of(prompt: TokenizedContext) -> Request:
    """The prompt up to its opening line, and from its task on.

    Raises:
        ConfigError: it has no such segments.
    """
    missing = [name for name in ("system", "task") if name not in prompt.spans]
    if missing:
        raise ConfigError(f"Composing latency needs prompts with a segment {missing[0]!r}: use task gated_decision.")
    return Request(prompt.token_ids[: prompt.spans["system"].end], prompt.token_ids[prompt.spans["task"].start :])


def prepare(subject: Subject, ids: Sequence[int], folder: Path) -> Prepared:
    """Compile a chunk behind the beginning of a text and store it."""
    header: Header = "bos" if beginning_of_text(subject.tokenizer) else "neutral"
    started = clock(subject)
    chunk = precompile(subject, ids, header)
    compiled = clock(subject)
    library = SkillLibrary(folder)
    path = library.save(subject, SKILL, chunk)
    return Prepared(chunk, library, compiled - started, time.perf_counter() - compiled, path.stat().st_size)


def repeated(chunk: Chunk, length: int) -> Chunk:
    """`length` tokens of a chunk over and over, its entries at positions one after the other."""
    times = -(-length // len(chunk))
    places = torch.arange(length)

    def over(tensor: Tensor) -> Tensor:
        return tensor.repeat(1, 1, times, 1)[:, :, :length].contiguous()

    layers = [(over(layer.keys), over(layer.values)) for layer in chunk.cache.layers]
    return Chunk((chunk.token_ids * times)[:length], KVCache.computed(layers, places), chunk.header)


def run_plain(subject: Subject, ids: Sequence[int]) -> tuple[Tensor, int]:
    """One pass without a mask of ours, so that the model library may pick its fastest kernel; FLOPs are not counted."""
    subject.check_prompt(len(ids))
    with torch.no_grad():
        output = subject.model(
            torch.tensor([ids], device=subject.device),
            past_key_values=empty_cache(),
            use_cache=True,
            logits_to_keep=1,
        )
    return logits_of(output, subject)[0], 0


def run_composed(
    subject: Subject, request: Request, scheme: ReuseScheme | None, chunk: Chunk | None
) -> tuple[Tensor, int]:
    """The task runs in one pass, its last token included, as in a full prefill; without a scheme no chunk is placed."""
    before = forward(subject, request.opening)
    cache, work = before.cache, before.receipt.flops
    if scheme is not None and chunk is not None:
        placed = scheme.place(subject, cache, chunk)
        cache, work = placed.cache, work + placed.receipt.flops
    after = forward(subject, request.task, cache)
    return after.logits, work + after.receipt.flops


def prefill_flops(subject: Subject, tokens: int) -> int:
    """FLOPs of one causal pass over so many tokens."""
    places = torch.arange(tokens)
    plan = plan_masks(subject, places, places, torch.ones(tokens, tokens, dtype=torch.bool).tril())
    return flops(subject, tokens, plan.attended, tokens)


def forget(path: Path) -> None:
    """Ask the system to drop a file from memory, so that loading reads the disk; not every system does."""
    if not hasattr(os, "posix_fadvise"):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
