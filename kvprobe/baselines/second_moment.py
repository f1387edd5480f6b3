"""The uncentred second moment of an MLP's hidden units over real text, kept for as long as its subject lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvprobe.baselines.base import Background
from kvprobe.baselines.mlp import batches, down_projection, logits_at, recorded
from kvprobe.errors import UnsupportedError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

_KEPT: WeakKeyDictionary[Subject, dict[tuple[int, int], Tensor]] = WeakKeyDictionary()


def second_moments(subject: Subject, layers: Sequence[int], background: Background) -> dict[int, Tensor]:
    """By layer `mean(k k^T)`, float64 `[unit, unit]`, over the inputs `k` of the down-projection at all text tokens.

    All layers that are not known yet are read in one pass.

    Raises:
        UnsupportedError: there is no text.
    """
    if not background.texts:
        raise UnsupportedError("ROME and MEMIT need real text to know what to leave alone; give background texts.")
    text = hash(background.texts)
    known = _KEPT.setdefault(subject, {})
    missing = [layer for layer in layers if (layer, text) not in known]
    if missing:
        for layer, moment in zip(missing, _measured(subject, missing, background.texts), strict=True):
            known[layer, text] = moment
    return {layer: known[layer, text] for layer in layers}


def _measured(subject: Subject, layers: Sequence[int], texts: Sequence[Sequence[int]]) -> list[Tensor]:
    modules = [down_projection(subject, layer) for layer in layers]
    sums = [torch.zeros(module.in_features, module.in_features, dtype=torch.float64) for module in modules]
    count = 0
    with recorded(modules) as records:
        for batch in batches(texts):
            logits_at(subject, batch, [(0, 0)])
            for number, record in enumerate(records):
                real = [record["input"][row, : len(prompt)] for row, prompt in enumerate(batch)]
                keys = torch.cat(real).to("cpu", torch.float64)
                sums[number] += keys.T @ keys
            count += sum(len(prompt) for prompt in batch)
    return [total / count for total in sums]


def with_ridge(moment: Tensor, ridge: float) -> Tensor:
    """The second moment with `ridge` times its mean diagonal on the diagonal, so that it can be inverted."""
    return moment + ridge * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
