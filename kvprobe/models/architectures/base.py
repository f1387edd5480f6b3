"""What an architecture adapter answers: masks, windows, RoPE tables, FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvprobe.errors import UnsupportedError
from kvprobe.models.images import ImageFeatures
from kvprobe.models.rotary import RotaryTable
from kvprobe.registry import KINDS, Registry

FULL = "full_attention"
SLIDING = "sliding_attention"
CHANGING = ("dynamic", "longrope")
"""RoPE scalings whose frequencies change with the length of the sequence."""


class ArchitectureAdapter:
    """Base of all adapters: a stack of decoder layers with grouped heads, RoPE keys and a gated MLP."""

    masks_by_layer_type: ClassVar[bool] = False
    """Whether the model takes a dict of masks by layer type; otherwise one mask serves all layers."""
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """The class of transformers that loads such a model."""
    pixel_scale: ClassVar[tuple[tuple[float, ...], tuple[float, ...]] | None] = None
    """Mean and deviation by channel with which a vision tower wants pixels from 0 to 1 normalised; None without one."""
    attention_backends: ClassVar[tuple[str, ...]] = ("sdpa", "eager")
    """Attention implementations that compute this architecture exactly; the first is the default."""
    adjacent_pairs: ClassVar[bool] = False
    """Whether cached keys are rotated in pairs of neighbouring channels; otherwise channel `i` turns with the one half
    the rotary width on."""
    has_experts: ClassVar[bool] = False
    """Whether some MLPs are mixtures of experts."""
    latent_cache: ClassVar[bool] = False
    """Whether a cached entry is a latent, from which each pass expands the keys and values of all heads."""

    @property
    def shares_prefix(self) -> bool:
        """Whether rows of a sweep can attend to one shared cache; a latent must be expanded for each row anew."""
        return not self.latent_cache

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
        types = self.layer_types(model.config.get_text_config())
        tables = {
            kind: RotaryTable.from_module(self.decoder(model).rotary_emb, kind, adjacent=self.adjacent_pairs)
            for kind in dict.fromkeys(types)
        }
        return tuple(tables[kind] for kind in types)

    def check_positions(self, model: Any, positions: Tensor) -> None:
        """Refuse a pass at positions whose frequencies are not those of keys cached before.

        Frequencies that a longer pass outside kvprobe has left behind are set back to those of the model's own reach.

        Raises:
            UnsupportedError: under dynamic or longrope scaling, a position beyond the length they start to act at.
        """
        rotary, config = self.decoder(model).rotary_emb, model.config.get_text_config()
        scalings = getattr(rotary, "rope_type", None)
        for kind, scaling in (scalings if isinstance(scalings, dict) else {"": scalings}).items():
            if scaling not in CHANGING or not len(positions):
                continue
            parameters = config.rope_parameters[kind] if kind else config.rope_parameters
            limit = int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
            if int(positions.max()) >= limit:
                raise UnsupportedError(
                    f"RoPE scaling {scaling!r} changes its frequencies beyond {limit} tokens, so that cached keys are "
                    f"no longer those of a prefill; position {int(positions.max())} is out of reach for kvprobe."
                )
            if scaling == "dynamic":
                _set_back(rotary, f"{kind}_" if kind else "")

    def settle(self, model: Any) -> None:
        """Choose kernels that compute in the dtype of `model`, once after loading."""
        if self.has_experts and model.dtype == torch.float64:
            # Grouped matrix products, the library's default for experts, stop at float32.
            model.set_experts_implementation("eager")
        unembedding = model.get_output_embeddings()
        if unembedding is not None:
            unembedding.register_forward_pre_hook(_with_plain_strides)

    def bridgeable(self, model: Any) -> Any:
        """`model`, if TransformerLens' bridge of it fits the engine's caches.

        Raises:
            UnsupportedError: it does not.
        """
        if self.latent_cache:
            raise UnsupportedError(
                f"TransformerLens caches the expanded keys and values of {model.config.model_type!r} and not its "
                "latent, so that components of latent attention cannot be studied on the engine's caches."
            )
        return model

    def model_cache(self, past: Any) -> Any:
        """A cache whose keys carry the positions, as the model wants it handed; layers stay those of `past`."""
        return past

    def own_cache(self, past: Any) -> Any:
        """The reverse of `model_cache`, also of a cache that the model made itself: keys carry the positions."""
        return past

    def generation_positions(self, positions: Tensor, axes: Tensor | None) -> Tensor:  # noqa: ARG002
        """What the model library's `generate` takes as `position_ids` of tokens at `positions` `[token]`.

        `axes` `[3, token]` are those of M-RoPE, None where all three are `positions`.
        """
        return positions[None]

    def image_inputs(self, model: Any, token_ids: Tensor, images: Sequence[ImageFeatures]) -> dict[str, Any]:  # noqa: ARG002
        """Further keyword arguments of a forward pass over `token_ids` in which image features stand for image tokens.

        Raises:
            UnsupportedError: the model reads no images, or they do not fit the image tokens.
        """
        if images:
            raise UnsupportedError(f"{type(self).__name__} is a model of text: it reads no images.")
        return {}

    def decoder(self, model: Any) -> Any:
        """The module that holds `layers` and `rotary_emb`."""
        return model.base_model

    def decoder_layers(self, model: Any) -> Sequence[Any]:
        """The decoder layers, first to last; each takes its mask as the keyword `attention_mask`."""
        layers: Sequence[Any] = self.decoder(model).layers
        return layers

    def output_projection(self, layer: Any) -> Any:
        """The module that maps the heads of a decoder layer, one after the other, to the residual stream."""
        return layer.self_attn.o_proj

    def head_dim(self, config: Any) -> int:
        """Channels of one head; not always hidden size over heads."""
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def cached_numbers(self, config: Any) -> int:
        """Numbers that one token leaves in the cache of one layer."""
        return int(2 * config.num_key_value_heads * self.head_dim(config))

    def flops_per_token(self, config: Any) -> int:
        """FLOPs of all matrix products with weights for one token, the output layer left out."""
        return self.attention_flops_per_token(config) + self.mlp_flops_per_token(config)

    def attention_flops_per_token(self, config: Any) -> int:
        """The share of attention in `flops_per_token`, of all layers."""
        heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
        return int(2 * config.hidden_size * heads * self.head_dim(config) * config.num_hidden_layers)

    def mlp_flops_per_token(self, config: Any) -> int:
        """The share of what follows attention in `flops_per_token`, of all layers."""
        return config.num_hidden_layers * gated_mlp_flops(config.hidden_size, config.intermediate_size)

    def flops_per_key(self, config: Any) -> int:  # noqa: ARG002 - adapters with a latent cache need it
        """FLOPs in one layer for each key of a pass, cached or new; 0 where a cached key is used as it is."""
        return 0

    def flops_per_attended_key(self, config: Any) -> int:
        """FLOPs of scores and weighted values for one query and one visible key in one layer."""
        return int(4 * config.num_attention_heads * self.head_dim(config))

    def flops_per_logits(self, config: Any) -> int:
        """FLOPs of the output layer at one position."""
        return int(2 * config.hidden_size * config.vocab_size)


ARCHITECTURES: Registry[type[ArchitectureAdapter]] = Registry(KINDS["ARCHITECTURES"])


def gated_mlp_flops(hidden: int, width: int) -> int:
    """FLOPs of one gated MLP of `width` channels for one token."""
    return int(2 * 3 * hidden * width)


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
        UnsupportedError: no adapter knows this `model_type`, or it is one that kvprobe refuses; nothing is guessed.
    """
    from kvprobe.models.architectures.refused import REFUSED

    if config.model_type in REFUSED:
        raise UnsupportedError(f"Model type {config.model_type!r} is refused: {REFUSED[config.model_type]}.")
    known = ARCHITECTURES.names()
    if config.model_type not in known:
        raise UnsupportedError(
            f"Model type {config.model_type!r} has no architecture adapter, so its attention masks, RoPE pairing "
            f"and window are not known to kvprobe (known: {', '.join(known)}); add one in kvprobe/models/architectures."
        )
    return ARCHITECTURES.get(config.model_type)()


def _set_back(rotary: nn.Module, prefix: str) -> None:
    """The frequencies that a dynamic RoPE begins with; the library leaves grown ones for exactly its own length."""
    if getattr(rotary, f"{prefix}max_seq_len_cached", rotary.max_seq_len_cached) == rotary.original_max_seq_len:
        return
    grown, original = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}original_inv_freq")
    rotary.register_buffer(f"{prefix}inv_freq", original.to(grown.device), persistent=False)
    setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def _with_plain_strides(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The hidden states as one block in memory.

    For a last token cut out of longer rows, PyTorch takes the bfloat16 product with a copy of the whole unembedding:
    5 s for 152,000 tokens on two cores, 0.07 s without.
    """
    hidden, *rest = arguments
    return hidden.reshape(hidden.shape), *rest
