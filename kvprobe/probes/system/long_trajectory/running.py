"""Many conversations of one layout, carried on side by side: one forward pass runs a turn of all of them.

All rows have the same segments at the same places, so they share positions and masks; only their tokens differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import call_model, logits_of
from kvprobe.engine.masks import plan_masks
from kvprobe.models.caching import empty_cache

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def run_rows(subject: Subject, ids: Tensor, cache: KVCache | None) -> tuple[Tensor, KVCache]:
    """Run tokens behind a cache, every row for itself.

    Args:
        subject: the model.
        ids: `[row, token]`, one token at least.
        cache: `[row, ...]` entries at positions 0, 1, ..., left as it is; None for nothing.

    Returns:
        Logits `[row, vocab]` at the last token, and the cache with the tokens' entries behind.
    """
    start = 0 if cache is None else len(cache)
    places = torch.arange(start, start + ids.shape[1])
    everything = torch.arange(start + ids.shape[1])
    causal = torch.ones(ids.shape[1], len(everything), dtype=torch.bool).tril(start)
    plan = plan_masks(subject, places, everything, causal, ())
    past = empty_cache() if cache is None or not start else cache.to_hugging_face()
    output = call_model(subject, ids, places, past, plan)
    filled = KVCache.computed([(layer.keys, layer.values) for layer in past.layers], everything)
    return logits_of(output, subject), filled


@dataclass(eq=False)
class Running:
    """The tokens of all conversations, and the entries that are held of their first ones.

    Attributes:
        subject: the model.
        ids: `[row, token]`.
        cache: of the first `len(cache)` tokens; None for none. What is beyond them has not been run yet.
        tokens: tokens run so far in each row.
    """

    subject: Subject
    ids: Tensor
    cache: KVCache | None = None
    tokens: int = 0

    @property
    def held(self) -> int:
        """How many tokens are cached."""
        return 0 if self.cache is None else len(self.cache)

    def append(self, ids: Tensor) -> None:
        """Put tokens `[row, token]` at the end; they are run with the next question."""
        self.ids = torch.cat([self.ids, ids], 1)

    def forget_from(self, place: int) -> None:
        """Drop the entries from a place on, so that they are run anew."""
        if place < self.held:
            assert self.cache is not None
            self.cache = self.cache.take(slice(0, place)) if place else None

    def remove(self, start: int, end: int) -> None:
        """Take tokens out; what stood behind them is run anew."""
        self.forget_from(start)
        self.ids = torch.cat([self.ids[:, :start], self.ids[:, end:]], 1)

    def write(self, start: int, ids: Tensor, *, keep_after: bool) -> None:
        """Put other tokens `[row, token]` in a place.

        Args:
            start: where.
            ids: as many as stand there.
            keep_after: compute the entries of the new tokens alone and keep all that follow, which saw the old ones.
        """
        end = start + ids.shape[1]
        self.ids = torch.cat([self.ids[:, :start], ids, self.ids[:, end:]], 1)
        if not keep_after or self.held < end:
            self.forget_from(start)
            return
        assert self.cache is not None
        _, fresh = run_rows(self.subject, ids, self.cache.take(slice(0, start)) if start else None)
        self.tokens += ids.shape[1]
        after = self.cache.take(slice(end, None))
        self.cache = KVCache.join([fresh, after]) if len(after) else fresh

    def ask(self, question: Tensor) -> Tensor:
        """Logits `[row, vocab]` behind a question `[row, token]`, which is not kept."""
        asked = torch.cat([self.ids[:, self.held :], question], 1)
        logits, cache = run_rows(self.subject, asked, self.cache)
        self.tokens += asked.shape[1]
        self.cache = cache.take(slice(0, self.ids.shape[1]))
        return logits
