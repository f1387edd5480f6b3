"""Chains of thought from many prompts, and the decision after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward
from kvprobe.engine.generation import Generation, generate
from kvprobe.engine.interventions import KVPatch
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.wordings import Wording

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Prompt = tuple[Sequence[int], KVCache]
"""Token ids of a whole prompt and its cache."""


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain of thought.

    Attributes:
        logits: `[vocab]` after the answer cue.
        length: tokens of the chain, the cue included.
        finished: whether the model itself wrote the cue; otherwise it was appended.
    """

    logits: Tensor
    length: int
    finished: bool


def finish_chains(subject: Subject, prompts: Sequence[Prompt], *, limit: int, batch_size: int) -> list[Chain]:
    """A greedy chain for each prompt, up to the answer cue (protocol 0.3).

    Args:
        subject: the model.
        prompts: prompts of any lengths; those of equal length run together.
        limit: most tokens of a chain that the model does not end itself.
        batch_size: chains generated together.
    """
    written = write_greedily(subject, prompts, limit=limit, batch_size=batch_size)
    return [_decided(subject, generation) for generation in written]


def write_greedily(
    subject: Subject, prompts: Sequence[Prompt], *, limit: int, batch_size: int | None = None
) -> list[Generation]:
    """What the model writes after each prompt, up to the answer cue, its end of text or the limit.

    Arguments as in `finish_chains`; without a `batch_size` all prompts of equal length run together.
    """
    stop = (Wording.answer_cue,)
    written: dict[int, Generation] = {}
    for numbers in _batches(prompts, batch_size or max(1, len(prompts))):
        ids, cache = prompts[numbers[0]]
        # Rows of one batch share a cache and differ by patches: here by all of it.
        whole = tuple(range(len(ids) - 1))
        rows = [KVPatch(whole, prompts[number][1], no_op=True) for number in numbers]
        written |= zip(numbers, generate(subject, ids, cache, rows, limit=limit, stop=stop), strict=True)
    return [written[number] for number in range(len(prompts))]


def _batches(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """Numbers of prompts that can run together: of equal length, and with the same last token, which is run."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, (ids, _) in enumerate(prompts):
        alike.setdefault((len(ids), ids[-1]), []).append(number)
    return [group[first : first + size] for group in alike.values() for first in range(0, len(group), size)]


def _decided(subject: Subject, generation: Generation) -> Chain:
    written, finished = list(generation.token_ids), generation.stop_length > 0
    # The last token of a generation is not in its cache yet; an end token has no place before the cue.
    rest = written[-1:] if finished or generation.censored else []
    if not finished:
        rest = [*rest, *encode_segment(f"\n{Wording.answer_cue}", subject.tokenizer)]
    result = forward(subject, rest, generation.cache)
    return Chain(result.logits, len(written) + (0 if finished else len(rest)), finished)
