"""The naive way: the whole prompt run again for each patch, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.case import Case, attention_modules, hooked
from benchmarks.contestants.base import CONTESTANTS, Contestant
from benchmarks.contestants.cache_clone import replace_head
from benchmarks.sweeps import HeadRow, KVRow, SuffixRow


@CONTESTANTS.register("full_forward")
class FullForward(Contestant):
    """PyTorch hooks on the projections, a whole prompt for each patch, logits at the last token only."""

    name = "full_forward"
    label = "full forward"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._attention = attention_modules(case.subject, case.subject.model)
        self._projected = case.projected

    def kv(self, row: KVRow) -> Tensor:
        """See `Contestant`."""
        base, donor = self._projected
        outputs: dict[object, Callable[[Tensor], Tensor]] = {}
        for number, module in enumerate(self._attention):
            places = row.positions if row.layers is None or number in row.layers else ()
            outputs[module.k_proj] = _kept(base.keys[number], donor.keys[number], places)
            outputs[module.v_proj] = _kept(base.values[number], donor.values[number], places)
        with hooked(outputs, {}):
            return self._decide(self.case.base_ids)

    def head(self, row: HeadRow) -> Tensor:
        """See `Contestant`."""
        change = replace_head(self._projected[1].heads[row.layer], row.head, self.case.subject)
        with hooked({}, {self._attention[row.layer].o_proj: change}):
            return self._decide(self.case.base_ids)

    def suffix(self, row: SuffixRow) -> Tensor:
        """See `Contestant`."""
        return self._decide((*self.case.base_ids[: -len(row.token_ids)], *row.token_ids))

    def _decide(self, token_ids: Sequence[int]) -> Tensor:
        subject = self.case.subject
        ids = torch.tensor([list(token_ids)], device=subject.device)
        logits: Tensor = subject.model(ids, use_cache=False, logits_to_keep=1).logits
        return self.case.margins(logits[0, -1])


def with_entries(new: Tensor, base: Tensor, donor: Tensor, places: Sequence[int]) -> Tensor:
    """Keys or values `[1, position, ...]` of the base, the donor's at `places`, and at the last token `new`'s own.

    Entries between a patch and the decision must not feel the patch, as they do not in a cache.
    """
    kept = base.clone()
    if places:
        index = torch.tensor(places)
        kept[:, index] = donor[:, index]
    kept[:, -1] = new[:, -1]
    return kept


def _kept(base: Tensor, donor: Tensor, places: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return lambda new: with_entries(new, base, donor, places)
