"""A chain of thought and the cell of the experiment that it was generated in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward
from kvprobe.engine.generation import Generation
from kvprobe.engine.interventions import AttentionKnockout, KVPatch
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True, eq=False)
class Cell:
    """What a chain is generated from, by name and as patches of the base prompt's cache, and what is hidden then."""

    cache: str
    arm: str
    patches: tuple[KVPatch, ...]
    knockouts: tuple[AttentionKnockout, ...] = ()


@dataclass(frozen=True, eq=False)
class Chain:
    """A generated chain up to the decision token.

    Attributes:
        cell: what it was generated from.
        ids: prompt and chain, ending in the answer's cue.
        cache: of all of them but the last.
        written: the tokens that the model wrote.
        censored: whether the model did not write the cue itself.
    """

    cell: Cell
    ids: tuple[int, ...]
    cache: KVCache
    written: tuple[int, ...]
    censored: bool


def finished(subject: Subject, pair: Pair, cell: Cell, generation: Generation, cue: Sequence[int]) -> Chain:
    """The chain with the answer's cue at its end, whether the model wrote it or not."""
    written = generation.token_ids
    ended = generation.stop_length > 0
    # One that ended otherwise ends in the end token, which has no place before the cue.
    kept = written if ended or generation.censored else written[:-1]
    ids = (*pair.base.token_ids, *kept, *(() if ended else cue))
    held = min(len(generation.cache), len(ids) - 1)
    cache, waiting = generation.cache.take(slice(0, held)), ids[held:-1]
    if waiting:
        cache = forward(subject, waiting, cache, knockouts=cell.knockouts).cache
    return Chain(cell, ids, cache, written, not ended)
