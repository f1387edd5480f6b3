"""Tiny random models of every supported architecture, made in milliseconds."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import torch
import transformers
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    StableLmConfig,
)

from kvprobe.models.architectures.base import architecture_of
from kvprobe.models.identity import identify
from kvprobe.models.subject import Subject

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
_PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    **{key: value for key, value in _SHAPE.items() if key != "head_dim"},
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# Keys are scaled by a factor of their own (mscale over mscale_all_dim), scores by another.
_LATENT_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.4}

# Ids of the tokens around and in an image lie above those that `tokens` draws.
_VISUAL: dict[str, Any] = {"vision_start_token_id": 61, "vision_end_token_id": 62, "image_token_id": 63}
_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "initializer_range": 0.3,
}


def _multimodal_rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 100.0, **more}


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
    "stablelm": StableLmConfig(**_SHAPE, rope_parameters=_PARTIAL),
    "glm": GlmConfig(**_SHAPE, rope_parameters=_PARTIAL),
    "qwen3_moe": Qwen3MoeConfig(**_SHAPE, **_EXPERTS, num_experts=6, decoder_sparse_step=2, norm_topk_prob=True),
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW),
    "deepseek_v2": DeepseekV2Config(
        **_LATENT,
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        rope_parameters=_LATENT_YARN,
    ),
    "deepseek_v3": DeepseekV3Config(**_LATENT, q_lora_rank=14, rope_parameters=_LATENT_YARN),
    "deepseek_v3_split": DeepseekV3Config(**_LATENT, q_lora_rank=None, rope_interleave=False),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={
            **{key: value for key, value in _SHAPE.items() if key != "head_dim"},
            "vocab_size": 64,
            "hidden_size": 64,
            "rope_parameters": _multimodal_rope(mrope_section=[2, 3, 3]),
        },
        vision_config={**_TOWER, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
        **_VISUAL,
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={
            **_SHAPE,
            "vocab_size": 64,
            "head_dim": 16,
            "rope_parameters": _multimodal_rope(mrope_section=[4, 2, 2], mrope_interleaved=True),
        },
        vision_config={**_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **_VISUAL,
    ),
    "qwen2_vl": Qwen2VLConfig(
        text_config={
            **{key: value for key, value in _SHAPE.items() if key != "head_dim"},
            "vocab_size": 64,
            "hidden_size": 64,
            "rope_parameters": _multimodal_rope(mrope_section=[2, 3, 3]),
        },
        vision_config={
            **{key: value for key, value in _TOWER.items() if key not in ("hidden_size", "out_hidden_size")},
            "embed_dim": 24,
            "hidden_size": 64,
        },
        **_VISUAL,
    ),
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config={
            **_SHAPE,
            **_EXPERTS,
            "vocab_size": 64,
            "head_dim": 16,
            "num_experts": 6,
            "decoder_sparse_step": 2,
            "rope_parameters": _multimodal_rope(mrope_section=[4, 2, 2], mrope_interleaved=True),
        },
        vision_config={**_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **_VISUAL,
    ),
    "gemma3_vision": Gemma3Config(
        text_config={
            **_SHAPE,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "rope_parameters": _TWO_BASES,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        image_token_index=60,
        boi_token_index=59,
        eoi_token_index=58,
    ),
    "two_digits": LlamaConfig(**{**_SHAPE, "num_hidden_layers": 12}),
}
ALIKE = ("qwen2_vl", "qwen3_vl_moe", "gemma3_vision")
"""Families whose attention is that of another one, measured by the laws of the support matrix alone."""
FAMILIES = tuple(name for name in CONFIGS if name not in ALIKE)
WINDOWED = ("gemma2", "gemma3", "gemma3_vision", "mistral", "mixtral")


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
        model_class = getattr(transformers, adapter.auto_class)
        model = model_class.from_config(deepcopy(config), attn_implementation=kernel).to(dtype).eval()
        adapter.settle(model)
    model.requires_grad_(False)
    # Laws of positions hold as far as one likes.
    return Subject(name, model, None, adapter, identify(model, None, name, "random"), extrapolates=True)


def rounds_to_float32(name: str) -> bool:
    """Whether the model library computes parts of this model in float32 even if it is a float64 one.

    Eager attention takes its softmax in float32, DeepSeek's routers their scores, DeepSeek-V2 its rotation too.
    """
    return tiny(name).identity.attention == "eager" or CONFIGS[name].model_type.startswith("deepseek")


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
