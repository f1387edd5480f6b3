"""Tiny random hybrids of attention and recurrence, and configurations of hybrids that are refused."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from tiny_models import VOCABULARY
from transformers import AutoModelForCausalLM, FalconH1Config, PretrainedConfig, Qwen3NextConfig

from kvprobe.composing.hybrid import hybrid_subject
from kvprobe.models.subject import Subject

SCAN, ATTEND = "linear_attention", "full_attention"

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_NEXT: dict[str, Any] = {
    **_SHAPE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}
LAYERS: dict[str, tuple[str, ...]] = {
    "scans_first": (SCAN, ATTEND, SCAN, ATTEND),
    "attends_first": (ATTEND, SCAN, ATTEND),
}
CONFIGS: dict[str, PretrainedConfig] = {
    name: Qwen3NextConfig(**_NEXT, num_hidden_layers=len(kinds), layer_types=list(kinds), mlp_only_layers=[1])
    for name, kinds in LAYERS.items()
}
FALCON = FalconH1Config(**_SHAPE, num_hidden_layers=2, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=8)


@cache
def tiny_hybrid(name: str, dtype: torch.dtype = torch.float64) -> Subject:
    """A hybrid with random weights, the same ones at every call."""
    return build_hybrid(CONFIGS[name], name, dtype)


def build_hybrid(config: PretrainedConfig, name: str, dtype: torch.dtype = torch.float64) -> Subject:
    """A fresh hybrid of `config` with seeded random weights and no tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(config)).to(dtype)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            # As drawn, a state forgets within a token or two, and no law would see whether it is the true one.
            layer.linear_attn.A_log.data.sub_(3.0)
    return hybrid_subject(model, name=name).extrapolating()
