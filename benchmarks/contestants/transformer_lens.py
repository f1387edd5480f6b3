"""TransformerLens: its bridge over the same weights, its patching utilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.case import Case, twin_of
from benchmarks.contestants.base import CONTESTANTS, Contestant
from benchmarks.contestants.full_forward import with_entries
from benchmarks.sweeps import HeadRow, KVRow, Row, SuffixRow


@CONTESTANTS.register("transformer_lens")
class TransformerLens(Contestant):
    """`generic_activation_patch` for heads; `run_with_hooks` where keys and values of many layers change at once."""

    name = "transformer_lens"
    label = "TransformerLens"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        model = twin_of(case.subject.architecture.bridgeable(case.subject.model))
        self._bridge: Any = build_bridge_from_module(
            model, type(model).__name__, hf_config=model.config, model_name=case.subject.name
        )
        model.requires_grad_(False)
        self._entries = [self._as_heads(prompt.keys, prompt.values) for prompt in case.projected]
        self._outputs = {
            f"blocks.{layer}.attn.hook_z": self._split(outputs).expand(-1, case.length, -1, -1)
            for layer, outputs in enumerate(case.projected[1].heads)
        }

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Margins `[row]`; heads all in one call of the library's own loop."""
        heads = [row for row in rows if isinstance(row, HeadRow)]
        return self._heads(heads) if len(heads) == len(rows) else super().run(rows)

    def _heads(self, rows: Sequence[HeadRow]) -> Tensor:
        from transformer_lens import patching

        places = pd.DataFrame(
            [(row.layer, self.case.length - 1, row.head) for row in rows], columns=["layer", "pos", "head"]
        )
        # Its own progress bar would break into ours.
        quiet, patching.tqdm = patching.tqdm, iter
        try:
            with torch.no_grad():
                margins: Tensor = patching.generic_activation_patch(
                    self._bridge,
                    self._ids(self.case.base_ids),
                    self._outputs,
                    lambda logits: self.case.margins(logits[0, -1]),
                    patching.layer_pos_head_vector_patch_setter,
                    "z",
                    index_df=places,
                )
                return margins.cpu()
        finally:
            patching.tqdm = quiet

    def kv(self, row: KVRow) -> Tensor:
        """See `Contestant`."""
        base, donor = self._entries
        hooks = []
        for layer in range(self.case.subject.layers):
            places = row.positions if row.layers is None or layer in row.layers else ()
            hooks += [
                (name, partial(_keep, base=base[name], donor=donor[name], places=places))
                for name in (f"blocks.{layer}.attn.hook_k", f"blocks.{layer}.attn.hook_v")
            ]
        logits: Tensor = self._bridge.run_with_hooks(self._ids(self.case.base_ids), fwd_hooks=hooks)
        return self.case.margins(logits[0, -1])

    def head(self, row: HeadRow) -> Tensor:
        """See `Contestant`."""
        return self._heads([row])[0]

    def suffix(self, row: SuffixRow) -> Tensor:
        """See `Contestant`."""
        ids = (*self.case.base_ids[: -len(row.token_ids)], *row.token_ids)
        logits: Tensor = self._bridge(self._ids(ids))
        return self.case.margins(logits[0, -1])

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(token_ids)], device=self.case.subject.device)

    def _split(self, entries: Tensor) -> Tensor:
        return entries.unflatten(-1, (-1, self.case.subject.architecture.head_dim(self.case.subject.config)))

    def _as_heads(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> dict[str, Tensor]:
        named = {f"blocks.{layer}.attn.hook_k": self._split(entries) for layer, entries in enumerate(keys)}
        return named | {f"blocks.{layer}.attn.hook_v": self._split(entries) for layer, entries in enumerate(values)}


def _keep(activation: Tensor, hook: Any, *, base: Tensor, donor: Tensor, places: Sequence[int]) -> Tensor:  # noqa: ARG001
    return with_entries(activation, base, donor, places)
