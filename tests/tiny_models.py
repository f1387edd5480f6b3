"""Tiny random models of every supported architecture, made in milliseconds."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvprobe.models.architectures.base import architecture_of
from kvprobe.models.subject import ModelIdentity, Subject

VOCABULARY = 61
WINDOW = 7

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
_TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
}

CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SHAPE),
    "qwen2": Qwen2Config(**_SHAPE),
    "llama": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "llama_linear": LlamaConfig(**_SHAPE, rope_parameters=_LINEAR),
    "llama_yarn": LlamaConfig(**_SHAPE, rope_parameters=_YARN),
    "gemma2": Gemma2Config(
        **{**_SHAPE, "num_hidden_layers": 4},
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        attn_implementation="eager",
    ),
    "gemma3": Gemma3TextConfig(
        **_SHAPE,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        rope_parameters=_TWO_BASES,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mistral": MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "wide_heads": Qwen3Config(**{**_SHAPE, "head_dim": 20}),
    "two_digits": LlamaConfig(**{**_SHAPE, "num_hidden_layers": 12}),
}
FAMILIES = tuple(CONFIGS)
WINDOWED = ("gemma2", "gemma3", "mistral")


@cache
def tiny(name: str, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Subject:
    """A subject with random weights, the same ones at every call; `attention` overrides the default kernel."""
    return build(CONFIGS[name], name, dtype, attention)


def build(
    config: PretrainedConfig, name: str, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> Subject:
    """A fresh subject of `config` with seeded random weights and no tokenizer."""
    adapter = architecture_of(config)
    kernel = attention or adapter.attention_backends[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=kernel).to(dtype).eval()
    model.requires_grad_(False)
    identity = ModelIdentity(
        name=name,
        source="random",
        architecture=config.model_type,
        weights_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        dtype=str(dtype),
        attention=kernel,
        device="cpu",
        parameters=model.num_parameters(),
    )
    return Subject(name, model, None, adapter, identity)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
