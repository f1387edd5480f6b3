"""Documents as padded tensors with explicit positions and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from kvprobe.organisms.documents import Document


@dataclass(frozen=True)
class Batch:
    """Tensors of one training step.

    `ids`, `positions` and `weights` are `[document, token]`; `weights[:, i]` weighs the prediction *of*
    token i. `answers` and `rivals` are `[document]` token ids, `answer_index` the place of the answer.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor
    rivals: torch.Tensor
    answer_index: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    decision: torch.Tensor
    documents: tuple[Document, ...]


def collate(documents: Sequence[Document]) -> Batch:
    """Pad on the right; padding comes after every real token, so no real token ever sees it."""
    length = max(len(document.ids) for document in documents)
    ids = torch.zeros(len(documents), length, dtype=torch.long)
    weights = torch.zeros(len(documents), length)
    positions = torch.arange(length).repeat(len(documents), 1)
    for row, document in enumerate(documents):
        ids[row, : len(document.ids)] = torch.tensor(document.ids)
        weights[row, : len(document.ids)] = torch.tensor(document.weights)
        if document.new >= 0:
            positions[row, document.new :] -= 1
    return Batch(
        ids,
        positions,
        weights,
        torch.tensor([document.answer for document in documents]),
        torch.tensor([document.rival for document in documents]),
        torch.tensor([document.answer_index for document in documents]),
        torch.tensor([document.old for document in documents]),
        torch.tensor([document.new for document in documents]),
        torch.tensor([document.decision for document in documents]),
        tuple(documents),
    )


def attention_masks(
    batch: Batch,
    config: PretrainedConfig,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Additive masks `[document, 1, query, key]` in the form the architecture takes them.

    Documents edited in place hide the new value from tokens before the decision and the old one from the
    decision and what follows it. `window` overrides the configuration's sliding window.
    """
    allowed = _visible(batch)
    layer_types = set(getattr(config, "layer_types", None) or ())
    # Mistral's configuration lists no layer types: all its layers slide.
    if getattr(config, "model_type", "") == "mistral":
        layer_types = {"sliding_attention"}
    distance = batch.positions[:, :, None] - batch.positions[:, None, :]
    reach = window or getattr(config, "sliding_window", None)
    masks = {}
    for layer_type in layer_types or {"full_attention"}:
        kept = allowed & (distance < reach) if layer_type == "sliding_attention" and reach else allowed
        masks[layer_type] = torch.where(kept, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _visible(batch: Batch) -> torch.Tensor:
    index = torch.arange(batch.ids.shape[1])
    queries, keys = index[None, :, None], index[None, None, :]
    old, new, decision = (tensor[:, None, None] for tensor in (batch.old, batch.new, batch.decision))
    late = queries >= decision
    hidden_old = (keys == old) & (late | (queries == new))
    hidden_new = (keys == new) & ~late & (queries != new)
    return (keys <= queries) & ~((hidden_old | hidden_new) & (new >= 0))
