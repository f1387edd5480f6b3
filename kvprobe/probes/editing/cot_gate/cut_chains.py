"""Chains of thought that can be cut anywhere and answered there: chain length as a controlled variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvprobe.edit.base import CachedPrompt
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward
from kvprobe.probes.kit.chains import write_greedily
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.wordings import Wording

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True, eq=False)
class WrittenChain:
    """A greedy chain of thought.

    Attributes:
        prompt_ids: the prompt it follows.
        thought: its tokens, without the answer cue and without the end token.
        cache: of the prompt and the thought, or of all but the thought's last token.
        censored: whether the limit came, or the model ended its text, before it wrote the answer cue.
    """

    prompt_ids: tuple[int, ...]
    thought: tuple[int, ...]
    cache: KVCache
    censored: bool


def write_chains(subject: Subject, prompts: Sequence[CachedPrompt], *, limit: int) -> list[WrittenChain]:
    """A greedy chain behind each prompt, of `limit` tokens at most; prompts of equal length run together."""
    written = write_greedily(subject, [(prompt.token_ids, prompt.cache) for prompt in prompts], limit=limit)
    chains = []
    for prompt, generation in zip(prompts, written, strict=True):
        ids = generation.token_ids
        ended = generation.stop_length > 0
        thought = ids if generation.censored else ids[: -max(1, generation.stop_length)]
        held = min(len(generation.cache), len(prompt.token_ids) + len(thought))
        chains.append(WrittenChain(prompt.token_ids, thought, generation.cache.take(slice(0, held)), not ended))
    return chains


def answered_after(subject: Subject, chain: WrittenChain, tokens: int | None = None) -> Tensor:
    """Logits `[vocab]` behind the answer cue that is put after the first `tokens` tokens of the thought (None: all).

    The cue begins a line of its own, as in a chain that the model ends itself.
    """
    kept = chain.thought if tokens is None else chain.thought[:tokens]
    line_break = encode_segment("\n", subject.tokenizer)
    opened = list(kept[-len(line_break) :]) == line_break
    cue = encode_segment(Wording.answer_cue, subject.tokenizer)
    ids = (*chain.prompt_ids, *kept, *(() if opened else line_break), *cue)
    held = min(len(chain.cache), len(chain.prompt_ids) + len(kept))
    return forward(subject, ids[held:], chain.cache.take(slice(0, held))).logits


def value_said(thought: Sequence[int], before: Sequence[int], values: Mapping[str, Sequence[int]]) -> str:
    """Which value a chain names at its place: right behind the first repetition of the session line's own words.

    Args:
        thought: tokens of the chain.
        before: tokens that come before the value in a session line.
        values: tokens of each value, by the name that is returned.

    Returns:
        One of the names, `other` where other tokens stand there, or `none` where the line is not repeated.
    """
    size = len(before)
    for start in range(len(thought) - size + 1):
        if list(thought[start : start + size]) == list(before):
            rest = list(thought[start + size :])
            return next((name for name, ids in values.items() if rest[: len(ids)] == list(ids)), "other")
    return "none"
