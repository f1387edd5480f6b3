"""Multi-head latent attention: one low-rank latent and one shared rotary key per token stand for all heads.

DeepSeek-AI, DeepSeek-V2 (arXiv:2405.04434), section 2.1. Keys of the cache are the shared rotary part `[batch, 1,
position, qk_rope_head_dim]`, the only one that carries position; values are the normed latent `[batch, 1, position,
kv_lora_rank]`, from which each pass expands keys and values of all heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvprobe.models.architectures.base import ARCHITECTURES, FULL, ArchitectureAdapter, gated_mlp_flops
from kvprobe.models.architectures.exchanged import exchanged, restored
from kvprobe.models.architectures.moe import mixture_flops


class LatentAttention(ArchitectureAdapter):
    """What DeepSeek-V2 and V3 share: full attention on an expanded latent, mixtures of experts after dense layers."""

    has_experts: ClassVar[bool] = True
    latent_cache: ClassVar[bool] = True

    def layer_types(self, config: Any) -> tuple[str, ...]:
        """All layers are full: the model takes one mask."""
        return (FULL,) * int(config.num_hidden_layers)

    def model_cache(self, past: Any) -> Any:
        """The model library writes the latent first and the rotary key second."""
        return exchanged(past)

    def own_cache(self, past: Any) -> Any:
        """Views are undone; what the model made itself is copied with its two tensors exchanged."""
        return restored(past)

    def head_dim(self, config: Any) -> int:
        """Channels of one expanded key."""
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)

    def cached_numbers(self, config: Any) -> int:
        """The latent with its rotary key."""
        return int(config.kv_lora_rank + config.qk_rope_head_dim)

    def numbers_per_token(self, config: Any) -> tuple[int, int]:
        """Cached per token and layer: the latent with its rotary key, and keys and values of all heads in its place."""
        expanded = config.num_attention_heads * (self.head_dim(config) + config.v_head_dim)
        return self.cached_numbers(config), int(expanded)

    def attention_flops_per_token(self, config: Any) -> int:
        """Queries, low-rank where the configuration says so, the latent with its rotary key, and the output."""
        queries = config.num_attention_heads * self.head_dim(config)
        rank = config.q_lora_rank
        asking = config.hidden_size * queries if rank is None else rank * (config.hidden_size + queries)
        latent = config.hidden_size * (config.kv_lora_rank + config.qk_rope_head_dim)
        output = config.num_attention_heads * config.v_head_dim * config.hidden_size
        return int(2 * (asking + latent + output) * config.num_hidden_layers)

    def mlp_flops_per_token(self, config: Any) -> int:
        """Dense layers first, then mixtures with experts that every token runs besides those it chooses."""
        dense = min(config.first_k_dense_replace, config.num_hidden_layers)
        shared = gated_mlp_flops(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)
        sparse = shared + mixture_flops(config, config.n_routed_experts, config.moe_intermediate_size)
        plain = gated_mlp_flops(config.hidden_size, config.intermediate_size)
        return int(dense * plain + (config.num_hidden_layers - dense) * sparse)

    def flops_per_key(self, config: Any) -> int:
        """Keys and values of all heads are expanded from the latent at every pass, for cached tokens too."""
        expanded = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
        return int(2 * config.kv_lora_rank * expanded)

    def flops_per_attended_key(self, config: Any) -> int:
        """Values have a width of their own."""
        return int(2 * config.num_attention_heads * (self.head_dim(config) + config.v_head_dim))


@ARCHITECTURES.register("deepseek_v2")
class DeepseekV2(LatentAttention):
    """DeepSeek-V2: latent cache, its rotary key in adjacent pairs."""

    adjacent_pairs: ClassVar[bool] = True


@ARCHITECTURES.register("deepseek_v3")
class DeepseekV3(LatentAttention):
    """DeepSeek-V3: latent cache; its rotary key is written half-split, whatever layout the weights have."""
