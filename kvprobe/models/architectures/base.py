"""What an architecture adapter answers: masks, windows, RoPE tables, FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvprobe.engine.rotary import RotaryTable
from kvprobe.errors import UnsupportedError
from kvprobe.registry import Registry

FULL = "full_attention"
SLIDING = "sliding_attention"


class ArchitectureAdapter:
    """Base of all adapters: a stack of decoder layers with grouped heads, RoPE keys and a gated MLP."""

    masks_by_layer_type: ClassVar[bool] = False
    """Whether the model takes a dict of masks by layer type; otherwise one mask serves all layers."""
    attention_backends: ClassVar[tuple[str, ...]] = ("sdpa", "eager")
    """Attention implementations that compute this architecture exactly; the first is the default."""

    def layer_types(self, config: Any) -> tuple[str, ...]:
        """`full_attention` or `sliding_attention` for each layer."""
        declared = getattr(config, "layer_types", None)
        types = tuple(declared) if declared else (FULL,) * int(config.num_hidden_layers)
        unknown = sorted(set(types) - {FULL, SLIDING})
        if unknown:
            raise UnsupportedError(
                f"Layers of type {', '.join(unknown)} of {config.model_type!r} have no mask rule in its adapter."
            )
        return types

    def window(self, config: Any) -> int | None:
        """Tokens a sliding layer sees, the query itself included; None when no layer slides."""
        if SLIDING not in self.layer_types(config):
            return None
        return int(config.sliding_window)

    def visible(self, config: Any, query_positions: Tensor, key_positions: Tensor, causal: Tensor) -> dict[str, Tensor]:
        """Which keys each query sees, by layer type.

        Args:
            config: Hugging Face configuration.
            query_positions: `[query]`.
            key_positions: `[key]`.
            causal: bool `[query, key]`, true where the key does not come after the query in the text.

        Returns:
            For each layer type of the model a bool `[query, key]`. A sliding layer sees keys at a distance
            smaller than the window, as in `transformers.masking_utils.sliding_window_overlay`.
        """
        rules = {FULL: causal}
        window = self.window(config)
        if window is not None:
            near = query_positions[:, None] - key_positions[None, :] < window
            rules[SLIDING] = causal & near
        return {kind: rules[kind] for kind in dict.fromkeys(self.layer_types(config))}

    def attention_mask(self, visible: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """What to pass to the model as `attention_mask`.

        Args:
            visible: by layer type, bool `[query, key]` or `[batch, query, key]`.
            dtype: the model's dtype.

        Returns:
            Additive float masks `[batch or 1, 1, query, key]`, as the model library accepts them.
        """
        masks = {kind: additive(seen, dtype) for kind, seen in visible.items()}
        if self.masks_by_layer_type:
            return masks
        (mask,) = masks.values()
        return mask

    def rotary(self, model: Any) -> tuple[RotaryTable, ...]:
        """The RoPE table of each layer.

        Raises:
            UnsupportedError: the scaling depends on the sequence length or is unknown.
        """
        tables = {
            kind: RotaryTable.from_module(self.decoder(model).rotary_emb, kind)
            for kind in dict.fromkeys(self.layer_types(model.config))
        }
        return tuple(tables[kind] for kind in self.layer_types(model.config))

    def decoder(self, model: Any) -> Any:
        """The module that holds `layers` and `rotary_emb`."""
        return model.base_model

    def decoder_layers(self, model: Any) -> Sequence[Any]:
        """The decoder layers, first to last; each takes its mask as the keyword `attention_mask`."""
        layers: Sequence[Any] = self.decoder(model).layers
        return layers

    def head_dim(self, config: Any) -> int:
        """Channels of one head; not always hidden size over heads."""
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def flops_per_token(self, config: Any) -> int:
        """FLOPs of all matrix products with weights for one token, the output layer left out."""
        heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
        weights = config.hidden_size * (heads * self.head_dim(config) + 3 * config.intermediate_size)
        return int(2 * weights * config.num_hidden_layers)

    def flops_per_attended_key(self, config: Any) -> int:
        """FLOPs of scores and weighted values for one query and one visible key in one layer."""
        return int(4 * config.num_attention_heads * self.head_dim(config))

    def flops_per_logits(self, config: Any) -> int:
        """FLOPs of the output layer at one position."""
        return int(2 * config.hidden_size * config.vocab_size)


ARCHITECTURES: Registry[type[ArchitectureAdapter]] = Registry(
    "architecture", "kvprobe.models.architectures", "kvprobe.architectures"
)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask `[query, key]` or `[batch, query, key]` as an additive `[batch or 1, 1, query, key]`.

    A finite minimum stands for minus infinity, one that stays finite where the softmax is taken in float32.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(~visible, max(torch.finfo(dtype).min, torch.finfo(torch.float32).min))
    return mask[None, None] if mask.ndim == 2 else mask[:, None]


def architecture_of(config: Any) -> ArchitectureAdapter:
    """The adapter of a Hugging Face configuration.

    Raises:
        UnsupportedError: no adapter knows this `model_type`; nothing is guessed.
    """
    known = ARCHITECTURES.names()
    if config.model_type not in known:
        raise UnsupportedError(
            f"Model type {config.model_type!r} has no architecture adapter, so its attention masks, RoPE pairing "
            f"and window are not known to kvprobe (known: {', '.join(known)}); add one in kvprobe/models/architectures."
        )
    return ARCHITECTURES.get(config.model_type)()
