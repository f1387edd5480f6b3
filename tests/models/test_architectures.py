"""Adapters: every tiny model has one, unknown architectures are refused."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, WINDOW, tiny
from transformers import GPT2Config, MistralConfig, Qwen3Config

from kvprobe.errors import UnsupportedError
from kvprobe.models.architectures.base import ARCHITECTURES, FULL, SLIDING, architecture_of

TYPES = {
    "gemma2": (SLIDING, FULL, SLIDING, FULL),
    "gemma3": (SLIDING, FULL, SLIDING),
    "gemma3_vision": (SLIDING, FULL, SLIDING),
    "mistral": (SLIDING,) * 3,
    "mixtral": (SLIDING,) * 3,
}


def test_every_adapter_describes_itself_and_has_a_tiny_model() -> None:
    assert {config.model_type for config in CONFIGS.values()} == set(ARCHITECTURES.names())
    assert all(ARCHITECTURES.describe().values())


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_types_and_window(name: str) -> None:
    subject = tiny(name)
    types = subject.architecture.layer_types(subject.config)
    assert types == TYPES.get(name, (FULL,) * subject.layers)
    assert subject.architecture.window(subject.config) == (WINDOW if name in TYPES else None)
    assert len(subject.architecture.decoder_layers(subject.model)) == subject.layers
    assert len(subject.architecture.rotary(subject.model)) == subject.layers


def test_head_dim_need_not_be_hidden_over_heads() -> None:
    subject = tiny("wide_heads")
    assert subject.architecture.head_dim(subject.config) == 20 != 32 // 4


def test_mistral_without_a_window_sees_everything() -> None:
    config = MistralConfig(sliding_window=None, num_hidden_layers=2)
    adapter = architecture_of(config)
    assert adapter.layer_types(config) == (FULL, FULL)
    assert adapter.window(config) is None


def test_qwen_with_sliding_layers_gets_a_window() -> None:
    config = Qwen3Config(use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3)
    adapter = architecture_of(config)
    assert adapter.layer_types(config) == (FULL, SLIDING, SLIDING)
    seen = adapter.visible(config, torch.tensor([9]), torch.arange(10), torch.ones(1, 10, dtype=torch.bool))
    assert {kind: int(mask.sum()) for kind, mask in seen.items()} == {FULL: 10, SLIDING: 5}


def test_gemma2_runs_on_the_eager_kernel_only() -> None:
    assert architecture_of(CONFIGS["gemma2"]).attention_backends == ("eager",)


def test_an_unknown_model_type_is_refused_and_named() -> None:
    with pytest.raises(UnsupportedError, match=r"'gpt2' has no architecture adapter.*gemma2.*qwen3"):
        architecture_of(GPT2Config())


def test_an_unknown_layer_type_is_refused() -> None:
    config = Qwen3Config(num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedError, match="linear_attention"):
        architecture_of(config).layer_types(config)
