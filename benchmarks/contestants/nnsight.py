"""nnsight: a trace of the whole prompt for each patch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.case import Case, attention_modules, twin_of
from benchmarks.contestants.base import CONTESTANTS, Contestant
from benchmarks.contestants.full_forward import with_entries
from benchmarks.sweeps import HeadRow, KVRow, SuffixRow


@CONTESTANTS.register("nnsight")
class NNsight(Contestant):
    """Interventions on outputs and inputs of the projections within a trace, logits at the last token only."""

    name = "nnsight"
    label = "nnsight"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        import nnsight

        # It rewrites the modules it is given.
        self._model = nnsight.NNsight(twin_of(case.subject.model))
        attention_modules(case.subject, case.subject.model)
        self._attention = attention_modules(case.subject, self._model)
        self._projected = case.projected

    def kv(self, row: KVRow) -> Tensor:
        """See `Contestant`."""
        base, donor = self._projected
        model, attention, ids = self._model, self._attention, self._ids(self.case.base_ids)
        layers = range(len(attention)) if row.layers is None else row.layers
        with model.trace(ids, use_cache=False, logits_to_keep=1):
            for number, module in enumerate(attention):
                places = row.positions if number in layers else ()
                keys, values = base.keys[number], base.values[number]
                module.k_proj.output = with_entries(module.k_proj.output, keys, donor.keys[number], places)
                module.v_proj.output = with_entries(module.v_proj.output, values, donor.values[number], places)
            logits = model.output.logits.save()
        return self.case.margins(logits[0, -1])

    def head(self, row: HeadRow) -> Tensor:
        """See `Contestant`."""
        model, module, ids = self._model, self._attention[row.layer], self._ids(self.case.base_ids)
        width = self.case.subject.architecture.head_dim(self.case.subject.config)
        place = slice(row.head * width, (row.head + 1) * width)
        donor = self._projected[1].heads[row.layer]
        with model.trace(ids, use_cache=False, logits_to_keep=1):
            module.o_proj.input[:, -1, place] = donor[:, -1, place]
            logits = model.output.logits.save()
        return self.case.margins(logits[0, -1])

    def suffix(self, row: SuffixRow) -> Tensor:
        """See `Contestant`."""
        model = self._model
        ids = self._ids((*self.case.base_ids[: -len(row.token_ids)], *row.token_ids))
        with model.trace(ids, use_cache=False, logits_to_keep=1):
            logits = model.output.logits.save()
        return self.case.margins(logits[0, -1])

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(token_ids)], device=self.case.subject.device)
