"""Moving cached entries: re-rotation and splice beside a plain copy, and the time to the first token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.case import random_tokens
from benchmarks.machine import measure_rates, median_rates
from benchmarks.results import FirstTokenLine, MoveLine
from benchmarks.rounds import Tell, spread
from benchmarks.settings import Settings
from benchmarks.work import Work, weights
from kvprobe.composing.chunk import precompile
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import flops, forward
from kvprobe.engine.masks import plan_masks
from kvprobe.engine.operations import reposition, splice
from kvprobe.models.caching import empty_cache
from kvprobe.models.subject import Subject

_OPENING, _TASK = 16, 16
_SHIFT = 1000


@dataclass(frozen=True, eq=False)
class Move:
    """An operation on a cache, and the tensors that it makes anew."""

    operation: str
    run: Callable[[], object]
    tensors: list[torch.Tensor]


def measure_moves(subject: Subject, settings: Settings, tell: Tell) -> Iterator[MoveLine]:
    """Re-rotation of keys and splice of a chunk, by the number of entries, whose content has no influence on speed."""
    for tokens in settings.move_tokens:
        cache = random_cache(subject, tokens)
        if cache.nbytes > settings.move_bytes:
            continue
        tell(f"{subject.name}, moving {tokens} entries")
        for move in _moves(subject, cache):
            yield _beside_copy(subject, move, tokens, settings.move_rounds)


def _moves(subject: Subject, cache: KVCache) -> list[Move]:
    opening = random_cache(subject, _OPENING)
    spliced, _ = splice(subject, opening, cache, _OPENING)
    keys = [layer.keys for layer in cache.layers]
    both = [tensor for layer in spliced.layers for tensor in (layer.keys, layer.values)]
    return [
        Move("re-rotation", lambda: reposition(subject, cache, _SHIFT), keys),
        Move("splice", lambda: splice(subject, opening, cache, _OPENING), both),
    ]


def random_cache(subject: Subject, tokens: int) -> KVCache:
    """A cache of random entries in the shapes of the model's own."""
    shapes = [(layer.keys.shape, layer.values.shape) for layer in forward(subject, (3,)).cache.layers]
    generator = torch.Generator().manual_seed(0)

    def made(shape: Sequence[int]) -> torch.Tensor:
        rows, heads, _, width = shape
        return torch.randn(rows, heads, tokens, width, generator=generator).to(subject.device, subject.dtype)

    return KVCache.computed([(made(keys), made(values)) for keys, values in shapes], torch.arange(tokens))


def _beside_copy(subject: Subject, move: Move, tokens: int, rounds: int) -> MoveLine:
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in move.tensors)
    # Outside the rounds: it drives everything else out of the processor's cache.
    rates = [measure_rates(3)]
    mine: list[float] = []
    copies: list[float] = []
    pair = (mine, move.run), (copies, lambda: [tensor.clone() for tensor in move.tensors])
    for number in range(rounds + 1):
        # There and back, so that neither always finds the bytes where the other left them.
        for seconds_taken, run in pair if number % 2 else pair[::-1]:
            seconds_taken.append(_seconds(run))
    mine, copies = mine[1:], copies[1:]
    rates.append(measure_rates(3))
    seconds, copy_seconds = spread(mine), spread(copies)
    return MoveLine(
        model=subject.name,
        tokens=tokens,
        operation=move.operation,
        nbytes=nbytes,
        rounds=len(mine),
        seconds=seconds,
        rate=nbytes / seconds.median,
        copy_rate=nbytes / copy_seconds.median,
        of_copy=spread([plain / taken for plain, taken in zip(copies, mine, strict=True)]),
        of_limit=Work(0, 2 * nbytes).shortest(median_rates(rates)) / seconds.median,
    )


def measure_first_tokens(subject: Subject, settings: Settings, tell: Tell) -> Iterator[FirstTokenLine]:
    """Logits after a short opening, a compiled chunk and a short task: the chunk spliced, or all of it prefilled."""
    estimate = 0.0
    reached = 0
    for length in settings.first_tokens:
        # Attention grows with the square of the length.
        if estimate * (length / reached) ** 2 > settings.prefill_seconds if reached else False:
            continue
        tell(f"{subject.name}, first token after {length}")
        line = _first_token(subject, length, settings)
        estimate, reached = line.prefill_seconds.median, length
        yield line


def _first_token(subject: Subject, length: int, settings: Settings) -> FirstTokenLine:
    opening, task = random_tokens(subject, _OPENING, seed=2), random_tokens(subject, _TASK, seed=3)
    # Compiling warms the machine up for the prefill.
    started = time.perf_counter()
    chunk = precompile(subject, random_tokens(subject, length, seed=4), "none")
    compiling = time.perf_counter() - started
    whole = (*opening, *chunk.token_ids, *task)
    rounds = settings.slow_rounds if compiling > settings.slow_seconds else settings.rounds

    def spliced() -> object:
        before = forward(subject, opening).cache
        placed, _ = splice(subject, before, chunk.cache, _OPENING)
        return forward(subject, task, placed).logits

    spliced()
    splices, prefills, rates = [], [], []
    for _ in range(rounds):
        splices.append(_seconds(spliced))
        prefills.append(_seconds(lambda: plain_prefill(subject, whole)))
        rates.append(measure_rates())
    machine = median_rates(rates)
    splice_seconds, prefill_seconds = spread(splices), spread(prefills)
    shortest = _splice_work(subject, length, chunk.cache.nbytes).shortest(machine)
    return FirstTokenLine(
        model=subject.name,
        tokens=length,
        rounds=rounds,
        splice_seconds=splice_seconds,
        prefill_seconds=prefill_seconds,
        ratio=spread([full / quick for full, quick in zip(prefills, splices, strict=True)]),
        splice_of_limit=shortest / splice_seconds.median,
        prefill_of_limit=_pass_work(subject, len(whole), len(whole)).shortest(machine) / prefill_seconds.median,
    )


def plain_prefill(subject: Subject, token_ids: Sequence[int]) -> Any:
    """One pass without a mask of ours, so that the model library may pick its fastest kernel."""
    with torch.no_grad():
        return subject.model(
            torch.tensor([list(token_ids)], device=subject.device),
            past_key_values=empty_cache(),
            use_cache=True,
            logits_to_keep=1,
        ).logits


def _pass_work(subject: Subject, tokens: int, keys: int) -> Work:
    places = torch.arange(keys)
    per_query = 4096
    attended = 0
    # A mask of all queries at once would not fit.
    for start in range(keys - tokens, keys, per_query):
        queries = places[start : start + per_query]
        causal = places[None, :] <= queries[:, None]
        attended += plan_masks(subject, queries, places, causal).attended
    return Work(flops(subject, tokens, attended, keys), weights(subject))


def _splice_work(subject: Subject, length: int, nbytes: int) -> Work:
    """Opening and task run, the chunk's entries read and written once and read again by the task."""
    keys = _OPENING + length + _TASK
    runs = _pass_work(subject, _OPENING, _OPENING) + _pass_work(subject, _TASK, keys)
    return runs + Work(0, 3.0 * nbytes)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - started
    del result
    return seconds
