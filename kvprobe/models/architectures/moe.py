"""Mixtures of experts: attention as in the dense models, an MLP of which each token runs a part."""

from __future__ import annotations

from typing import Any, ClassVar

from kvprobe.models.architectures.base import ARCHITECTURES, gated_mlp_flops
from kvprobe.models.architectures.sliding import Mistral


@ARCHITECTURES.register("mixtral")
class Mixtral(Mistral):
    """Mixtral: Mistral's attention, every MLP a mixture of experts."""

    has_experts: ClassVar[bool] = True

    def mlp_flops_per_token(self, config: Any) -> int:
        """The router and the experts that one token is sent to."""
        return config.num_hidden_layers * mixture_flops(config, config.num_local_experts, config.intermediate_size)


@ARCHITECTURES.register("qwen3_moe")
class Qwen3Moe(Mistral):
    """Qwen3-MoE: Qwen3's attention, all layers sliding or none; mixtures of experts among dense layers."""

    has_experts: ClassVar[bool] = True

    def mlp_flops_per_token(self, config: Any) -> int:
        """As the configuration spreads dense and sparse layers."""
        layers = range(config.num_hidden_layers)
        sparse = sum(
            layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0 for layer in layers
        )
        dense = (config.num_hidden_layers - sparse) * gated_mlp_flops(config.hidden_size, config.intermediate_size)
        return dense + sparse * mixture_flops(config, config.num_experts, config.moe_intermediate_size)


def mixture_flops(config: Any, experts: int, width: int) -> int:
    """FLOPs of a mixture of `experts` of `width` channels each for one token: the router and those it chooses."""
    router = 2 * config.hidden_size * experts
    return int(router + config.num_experts_per_tok * gated_mlp_flops(config.hidden_size, width))
