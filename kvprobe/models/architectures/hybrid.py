"""Hybrids of attention and recurrence of which a part can be reused: what their layers are and cost.

An adapter here is in no registry: the engine's operations on caches are refused. A recurrent state sums up every token
before it and has no entry per token, so nothing of it can be edited, hidden or moved. What is left is the reuse of keys
and values in the attention layers while everything else is run; see `kvprobe.composing.hybrid`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from kvprobe.errors import UnsupportedError
from kvprobe.models.architectures.base import FULL, ArchitectureAdapter, gated_mlp_flops
from kvprobe.models.architectures.moe import mixture_flops
from kvprobe.models.architectures.refused import REFUSED
from kvprobe.models.rotary import RotaryTable


class Qwen3NextHybrid(ArchitectureAdapter):
    """Qwen3-Next: layers of gated attention among layers of the gated delta rule, mixtures of experts in both.

    Qwen team, Qwen3-Next (2025); Yang et al., Gated Delta Networks (arXiv:2412.06464).
    """

    has_experts: ClassVar[bool] = True

    def layer_types(self, config: Any) -> NoReturn:
        """Always refused: the engine's masks, tables and operations ask for these first.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"Model type {config.model_type!r} is refused: {REFUSED[config.model_type]}.")

    def bridgeable(self, model: Any) -> NoReturn:
        """Always refused, as `layer_types` is."""
        self.layer_types(model.config)

    def attention_layers(self, config: Any) -> tuple[int, ...]:
        """The numbers of the layers that attend; all others scan."""
        return tuple(number for number, kind in enumerate(config.layer_types) if kind == FULL)

    def attention_table(self, model: Any) -> RotaryTable:
        """The RoPE table of all attention layers.

        Raises:
            UnsupportedError: the scaling depends on the sequence length or is unknown.
        """
        return RotaryTable.from_module(self.decoder(model).rotary_emb)

    def projection_flops_per_token(self, config: Any) -> int:
        """FLOPs of the key and value projections of all attention layers for one token: all that reuse can save."""
        wide = 2 * config.num_key_value_heads * self.head_dim(config)
        return int(2 * config.hidden_size * wide * len(self.attention_layers(config)))

    def attention_flops_per_token(self, config: Any) -> int:
        """Projections of both kinds of layers; queries come with a gate of their size."""
        attending = len(self.attention_layers(config))
        heads = 3 * config.num_attention_heads * self.head_dim(config)
        asking = 2 * config.hidden_size * heads * attending
        keys, values = self._recurrent_widths(config)
        scanned = 2 * keys + 3 * values + 2 * config.linear_num_value_heads
        scanning = 2 * config.hidden_size * scanned * (config.num_hidden_layers - attending)
        return int(asking + self.projection_flops_per_token(config) + scanning)

    def mlp_flops_per_token(self, config: Any) -> int:
        """Dense layers, and mixtures with one gated expert that every token runs besides those it chooses."""
        sparse = sum(
            number not in config.mlp_only_layers
            and config.num_experts > 0
            and (number + 1) % config.decoder_sparse_step == 0
            for number in range(config.num_hidden_layers)
        )
        shared = gated_mlp_flops(config.hidden_size, config.shared_expert_intermediate_size) + 2 * config.hidden_size
        mixture = mixture_flops(config, config.num_experts, config.moe_intermediate_size) + shared
        dense = gated_mlp_flops(config.hidden_size, config.intermediate_size)
        return int(sparse * mixture + (config.num_hidden_layers - sparse) * dense)

    def recurrence_flops_per_token(self, config: Any) -> int:
        """FLOPs of convolution and delta rule of all recurrent layers for one token, as the rule is written.

        The state decays, is read with the key, gets an outer product added and is read with the query; kernels that
        take many tokens at once do more.
        """
        keys, values = self._recurrent_widths(config)
        convolution = 2 * config.linear_conv_kernel_dim * (2 * keys + values)
        rule = 7 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        return int((convolution + rule) * (config.num_hidden_layers - len(self.attention_layers(config))))

    def prefill_flops(self, config: Any, tokens: int) -> int:
        """FLOPs of one causal pass over `tokens` tokens, with logits at the last."""
        each = self.flops_per_token(config) + self.recurrence_flops_per_token(config)
        attended = len(self.attention_layers(config)) * tokens * (tokens + 1) // 2
        return int(tokens * each + attended * self.flops_per_attended_key(config) + self.flops_per_logits(config))

    def largest_saving(self, config: Any) -> float:
        """The share of the FLOPs of all weights for one token that reuse saves: a bound, reached by no prompt.

        Scores, the recurrence, the output layer and all tokens that are not in a chunk come on top of what is run.
        """
        return self.projection_flops_per_token(config) / self.flops_per_token(config)

    def _recurrent_widths(self, config: Any) -> tuple[int, int]:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        return int(keys), int(config.linear_num_value_heads * config.linear_value_head_dim)


PARTIAL: dict[str, type[Qwen3NextHybrid]] = {"qwen3_next": Qwen3NextHybrid}
"""Hybrids whose attention layers take moved keys and values, by `model_type`."""


def hybrid_of(config: Any) -> Qwen3NextHybrid:
    """The adapter of a hybrid.

    Raises:
        UnsupportedError: another hybrid, a model that is recurrent alone, or one that is none of both.
    """
    kind = config.model_type
    if kind in PARTIAL:
        return PARTIAL[kind]()
    known = ", ".join(PARTIAL)
    if kind in REFUSED:
        raise UnsupportedError(
            f"Model type {kind!r} is refused: {REFUSED[kind]}; of hybrids, kvprobe composes {known} alone."
        )
    raise UnsupportedError(
        f"Model type {kind!r} is not a hybrid of attention and recurrence ({known}); use kvprobe.composing.base."
    )
