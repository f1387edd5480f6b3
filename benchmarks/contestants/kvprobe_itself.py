"""kvprobe's own sweeps, by its public functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.contestants.base import CONTESTANTS, REFERENCE, Contestant
from benchmarks.sweeps import HeadRow, KVRow, Row, SuffixRow
from benchmarks.work import Work, shared_work
from kvprobe.engine.components import ActivationEdit, Components, components, set_to
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.suffixes import run_suffixes
from kvprobe.engine.sweep import run_patches


@CONTESTANTS.register("kvprobe")
class Kvprobe(Contestant):
    """`run_patches`, `components(...).run` and `run_suffixes`, all rows in one call."""

    name = REFERENCE
    label = "kvprobe"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._bridged()

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Margins `[row]`, the rows together."""
        case = self.case
        if all(isinstance(row, KVRow) for row in rows):
            patches = [self._patch(row) for row in rows if isinstance(row, KVRow)]
            return run_patches(case.subject, case.base_ids, case.base, patches, reduce=case.margins)
        if all(isinstance(row, HeadRow) for row in rows):
            edits = [[self._edit(row)] for row in rows if isinstance(row, HeadRow)]
            return self._bridged().run(case.base_ids[-1:], edits, cache=case.before, reduce=case.margins)
        suffixes = [row.token_ids for row in rows if isinstance(row, SuffixRow)]
        prefix = case.base.take(slice(0, case.length - len(suffixes[0])))
        return case.margins(torch.stack([suffix.logits for suffix in run_suffixes(case.subject, prefix, suffixes)]))

    def kv(self, row: KVRow) -> Tensor:
        """See `Contestant`."""
        return self.run([row])[0]

    def head(self, row: HeadRow) -> Tensor:
        """See `Contestant`."""
        return self.run([row])[0]

    def suffix(self, row: SuffixRow) -> Tensor:
        """See `Contestant`."""
        return self.run([row])[0]

    def work(self, rows: Sequence[Row]) -> Work:
        """Only the tokens that change, on weights and entries that all rows share."""
        first = rows[0]
        tokens = len(first.token_ids) if isinstance(first, SuffixRow) else 1
        entries = 0.0
        if isinstance(first, KVRow):
            share = 1.0 if first.layers is None else len(first.layers) / self.case.subject.layers
            entries = len(first.positions) * share
        return shared_work(self.case, len(rows), tokens, entries)

    def _patch(self, row: KVRow) -> KVPatch:
        return KVPatch(row.positions, self.case.donor, row.layers)

    def _edit(self, row: HeadRow) -> ActivationEdit:
        outputs = self._outputs[row.layer][0]
        return ActivationEdit(f"blocks.{row.layer}.attn.hook_z", set_to(outputs[row.head], head=row.head))

    def _bridged(self) -> Components:
        return components(self.case.subject)

    @cached_property
    def _outputs(self) -> list[Tensor]:
        """The donor's heads `[1, head, head_dim]` at the last token, by layer."""
        case = self.case
        names = [f"blocks.{layer}.attn.hook_z" for layer in range(case.subject.layers)]
        before = case.donor.take(slice(0, case.length - 1))
        with torch.no_grad():
            captured = self._bridged().capture(case.donor_ids[-1:], names, cache=before)
        return [captured.activations[name] for name in names]
