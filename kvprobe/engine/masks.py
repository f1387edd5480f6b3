"""Attention masks of one forward pass, attention knockouts included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.engine.interventions import AttentionKnockout, layers_of
from kvprobe.errors import NoEffectError, UnsupportedError
from kvprobe.models.architectures.base import additive
from kvprobe.models.subject import Subject


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """Which keys each query sees.

    Attributes:
        by_type: bool `[query, key]` for each layer type.
        by_layer: with knockouts, bool `[row, query, key]` for each layer; otherwise None.
        layer_types: the type of each layer.
    """

    by_type: dict[str, Tensor]
    by_layer: tuple[Tensor, ...] | None
    layer_types: tuple[str, ...]

    @property
    def attended(self) -> int:
        """Pairs of query and visible key, summed over layers; per row where knockouts differ (mean, rounded down)."""
        if self.by_layer is not None:
            return sum(int(mask.sum()) // len(mask) for mask in self.by_layer)
        counts = {kind: int(seen.sum()) for kind, seen in self.by_type.items()}
        return sum(counts[kind] for kind in self.layer_types)


def plan_masks(
    subject: Subject,
    query_positions: Tensor,
    key_positions: Tensor,
    causal: Tensor,
    knockouts: Sequence[Sequence[AttentionKnockout]] = (),
) -> MaskPlan:
    """The masks of one forward pass.

    Args:
        subject: the model.
        query_positions: `[query]`.
        key_positions: `[key]`, cached entries first, then the queries themselves.
        causal: bool `[query, key]` by order in the text.
        knockouts: for each row of the batch its knockouts; empty for none at all.

    Raises:
        NoEffectError: a knockout hides nothing that was visible.
        UnsupportedError: a knockout leaves a query without any key, which no softmax can express.
    """
    config = subject.config
    by_type = subject.architecture.visible(config, query_positions, key_positions, causal)
    types = subject.architecture.layer_types(config)
    if not any(knockouts):
        return MaskPlan(by_type, None, types)
    by_layer = tuple(by_type[kind].expand(len(knockouts), -1, -1).clone() for kind in types)
    for row, row_knockouts in enumerate(knockouts):
        for knockout in row_knockouts:
            _hide(by_layer, row, knockout, query_positions, key_positions)
    return MaskPlan(by_type, by_layer, types)


def _hide(by_layer: tuple[Tensor, ...], row: int, knockout: AttentionKnockout, queries: Tensor, keys: Tensor) -> None:
    asked = torch.isin(queries, torch.as_tensor(knockout.queries, dtype=torch.long))
    hidden = asked[:, None] & torch.isin(keys, torch.as_tensor(knockout.keys, dtype=torch.long))[None, :]
    effective = False
    for layer in layers_of(knockout, len(by_layer)):
        seen = by_layer[layer][row]
        effective = effective or bool((seen & hidden).any())
        seen &= ~hidden
        if not bool(seen.any(-1).all()):
            raise UnsupportedError(
                f"The knockout leaves a query without any visible key in layer {layer}; keep at least one, such as "
                "the query itself."
            )
    if not effective and not knockout.no_op:
        raise NoEffectError(
            "The attention knockout hides nothing: no named query of this pass sees a named key; check the positions "
            "and the window, or declare no_op."
        )


@contextmanager
def applied(subject: Subject, plan: MaskPlan) -> Iterator[Tensor | dict[str, Tensor]]:
    """What to pass as `attention_mask`; inside the block, masks that differ by layer replace it layer by layer."""
    device, dtype = subject.device, subject.dtype
    shared = subject.architecture.attention_mask({k: m.to(device) for k, m in plan.by_type.items()}, dtype)
    handles = []
    try:
        if plan.by_layer is not None:
            layers = subject.architecture.decoder_layers(subject.model)
            for layer, seen in zip(layers, plan.by_layer, strict=True):
                replace = _MaskReplacement(additive(seen.to(device), dtype))
                handles.append(layer.register_forward_pre_hook(replace, with_kwargs=True))
        yield shared
    finally:
        for handle in handles:
            handle.remove()


class _MaskReplacement:
    """Forward pre-hook that hands a decoder layer its own attention mask."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" not in kwargs:
            raise UnsupportedError(f"{type(module).__name__} does not take its attention mask as a keyword.")
        return args, {**kwargs, "attention_mask": self.mask}
