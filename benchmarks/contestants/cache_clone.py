"""One patch at a time: clone the Hugging Face cache, change it, run the last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, attention_modules, hooked
from benchmarks.contestants.base import CONTESTANTS, Contestant
from benchmarks.sweeps import HeadRow, KVRow, Row, SuffixRow
from benchmarks.work import Work, tokens_work, weights


@CONTESTANTS.register("cache_clone")
class CacheClone(Contestant):
    """A clone of the `DynamicCache` for each patch, and one pass over the tokens after it."""

    name = "cache_clone"
    label = "cache clone"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._attention = attention_modules(case.subject, case.subject.model)
        self._heads = case.projected[1].heads

    def kv(self, row: KVRow) -> Tensor:
        """See `Contestant`."""
        case = self.case
        past = self._clone(case.length - 1)
        places = torch.tensor(row.positions)
        for number in range(case.subject.layers) if row.layers is None else row.layers:
            layer, donor = past.layers[number], case.donor.layers[number]
            layer.keys[:, :, places] = donor.keys[:, :, places]
            layer.values[:, :, places] = donor.values[:, :, places]
        return self._decide(case.base_ids[-1:], past)

    def head(self, row: HeadRow) -> Tensor:
        """See `Contestant`."""
        change = replace_head(self._heads[row.layer], row.head, self.case.subject)
        with hooked({}, {self._attention[row.layer].o_proj: change}):
            return self._decide(self.case.base_ids[-1:], self._clone(self.case.length - 1))

    def suffix(self, row: SuffixRow) -> Tensor:
        """See `Contestant`."""
        return self._decide(row.token_ids, self._clone(self.case.length - len(row.token_ids)))

    def work(self, rows: Sequence[Row]) -> Work:
        """For each row the weights, and the entries read, written and read again."""
        tokens = len(rows[0].token_ids) if isinstance(rows[0], SuffixRow) else 1
        one = tokens_work(self.case, tokens)
        return Work(one.flops, weights(self.case.subject) + 3 * one.nbytes).times(len(rows))

    def _clone(self, length: int) -> Any:
        from transformers.cache_utils import DynamicCache

        pairs = [
            (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()) for layer in self.case.base.layers
        ]
        return DynamicCache(pairs)

    def _decide(self, token_ids: tuple[int, ...], past: Any) -> Tensor:
        subject = self.case.subject
        ids = torch.tensor([token_ids], device=subject.device)
        logits: Tensor = subject.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits
        return self.case.margins(logits[0, -1])


def replace_head(outputs: Tensor, head: int, subject: Any) -> Any:
    """A change of the heads side by side, `[1, token, head * head_dim]`: one head's at the last token is another's."""
    width = subject.architecture.head_dim(subject.config)
    place = slice(head * width, (head + 1) * width)

    def change(given: Tensor) -> Tensor:
        changed = given.clone()
        changed[:, -1, place] = outputs[:, -1, place]
        return changed

    return change
