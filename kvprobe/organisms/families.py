"""The four architectures of the organisms, at a size a laptop trains in minutes."""

from __future__ import annotations

from typing import Any

from transformers import Gemma2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from kvprobe.errors import UnknownNameError

_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}
# As the large models of these families have it (Gemma-2 excepted, which keeps 10,000): most channels then hardly turn
# within a thousand tokens, and content is compared in those.
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
_WINDOWS = {"gemma2": 128, "mistral": 640}


def organism_config(family: str, vocabulary_size: int) -> PretrainedConfig:
    """The Hugging Face configuration of one family.

    Raises:
        UnknownNameError: the family is not one of the four.
    """
    shape = {**_SHAPE, "vocab_size": vocabulary_size}
    if family == "qwen3":
        return Qwen3Config(**shape, rope_parameters=_ROPE)
    if family == "llama":
        return LlamaConfig(**shape, rope_parameters=_LLAMA3_SCALING)
    if family == "gemma2":
        return Gemma2Config(
            **shape,
            rope_parameters=_ROPE,
            sliding_window=_WINDOWS[family],
            query_pre_attn_scalar=32,
            attn_implementation="eager",
        )
    if family == "mistral":
        return MistralConfig(**shape, rope_parameters=_ROPE, sliding_window=_WINDOWS[family])
    raise UnknownNameError("organism family", family, FAMILIES)


FAMILIES = ("qwen3", "llama", "gemma2", "mistral")
