"""Traps of the model library that would silently spoil a result."""

from __future__ import annotations

import pytest
import torch
from tiny_models import WINDOW, WINDOWED, tiny, tokens
from transformers import AutoModelForCausalLM, FalconH1Config, Qwen3NextConfig
from transformers.cache_utils import DynamicCache, StaticCache

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import append, slice_cache
from kvprobe.errors import UnsupportedError
from kvprobe.models.architectures.base import architecture_of

HYBRID = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def filled(name: str, length: int, past: object) -> object:
    with torch.no_grad():
        tiny(name).model(torch.tensor([tokens(length)]), past_key_values=past, use_cache=True)
    return past


@pytest.mark.parametrize("name", WINDOWED)
def test_a_cache_with_config_truncates_and_is_refused(name: str) -> None:
    past = filled(name, WINDOW + 5, DynamicCache(config=tiny(name).config))
    assert past.layers[0].get_seq_length() == WINDOW + 5
    assert past.layers[0].keys.shape[2] == WINDOW - 1
    with pytest.raises(UnsupportedError, match=f"Layer 0 .* reports {WINDOW + 5} tokens and holds {WINDOW - 1}"):
        KVCache.from_hugging_face(past)


@pytest.mark.parametrize("name", WINDOWED)
def test_truncation_is_seen_from_exactly_the_window_on(name: str) -> None:
    short = filled(name, WINDOW - 1, DynamicCache(config=tiny(name).config))
    assert len(KVCache.from_hugging_face(short)) == WINDOW - 1
    with pytest.raises(UnsupportedError, match="truncated"):
        KVCache.from_hugging_face(filled(name, WINDOW, DynamicCache(config=tiny(name).config)))


@pytest.mark.parametrize("name", WINDOWED)
def test_all_layers_keep_all_entries_beyond_the_window(name: str) -> None:
    cache = prefill(tiny(name), tokens(3 * WINDOW)).cache
    cache, _ = append(tiny(name), cache, tokens(WINDOW))
    assert {layer.keys.shape[2] for layer in cache.layers} == {4 * WINDOW}
    assert not any(layer.is_sliding for layer in cache.to_hugging_face().layers)


def test_static_and_empty_caches_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="StaticLayer"):
        KVCache.from_hugging_face(StaticCache(config=tiny("qwen3").config, max_cache_len=8))
    with pytest.raises(UnsupportedError, match="empty"):
        KVCache.from_hugging_face(DynamicCache(config=tiny("qwen3").config))
    with pytest.raises(UnsupportedError, match="no layers"):
        KVCache.from_hugging_face(DynamicCache())


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_the_caches_of_hybrids_are_refused_before_their_recurrent_state_is_lost(kind: str) -> None:
    """Each layer of Falcon-H1 attends and scans: its keys alone would convert and be half of its state."""
    configs = {
        "falcon_h1": FalconH1Config(**HYBRID, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=8),
        "qwen3_next": Qwen3NextConfig(
            **HYBRID,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    }
    with pytest.raises(UnsupportedError, match=f"'{kind}' is refused: it mixes attention with recurrent layers"):
        architecture_of(configs[kind])
    model = AutoModelForCausalLM.from_config(configs[kind]).eval()
    with torch.no_grad():
        past = model(torch.tensor([tokens(5)]), use_cache=True).past_key_values
    assert any(getattr(layer, "keys", None) is not None for layer in past.layers)
    with pytest.raises(UnsupportedError, match="Only a filled DynamicCache of attention layers"):
        KVCache.from_hugging_face(past)


def test_crop_zero_keeps_everything_but_an_empty_slice_is_empty() -> None:
    past = filled("qwen3", 6, DynamicCache())
    past.crop(0)
    assert past.get_seq_length() == 6
    empty, receipt = slice_cache(KVCache.from_hugging_face(past), range(0))
    assert len(empty) == receipt.tokens_reused == 0
    again = forward(tiny("qwen3"), tokens(6), empty)
    assert torch.equal(again.logits, prefill(tiny("qwen3"), tokens(6)).logits)


def test_left_padding_corrupts_keys_while_logits_look_right() -> None:
    subject, ids, pad = tiny("llama"), tokens(6), 4
    mask = torch.tensor([[0] * pad + [1] * 6])
    with torch.no_grad():
        padded = subject.model(torch.tensor([[0] * pad + ids]), attention_mask=mask, use_cache=True)
    clean = prefill(subject, ids)
    torch.testing.assert_close(padded.logits[0, -1], clean.logits, atol=1e-5, rtol=0)
    shifted = KVCache.from_hugging_face(padded.past_key_values)
    assert float((shifted.layers[0].keys[:, :, pad:] - clean.cache.layers[0].keys).abs().max()) > 0.1
    assert clean.cache.positions.tolist() == list(range(6))


def test_positions_are_explicit_and_ambiguity_is_refused() -> None:
    layer = torch.zeros(1, 1, 3, 2)
    cache = KVCache.computed([(layer, layer)], torch.tensor([4, 9, 4]))
    assert cache.index_of([9]).tolist() == [1]
    with pytest.raises(UnsupportedError, match="two entries at position 4"):
        cache.index_of([4])
    with pytest.raises(UnsupportedError, match="no entry at position 5"):
        cache.index_of([5])
    with pytest.raises(UnsupportedError, match="3 entries for 2 positions"):
        KVCache.computed([(layer, layer)], torch.tensor([0, 1]))


def test_a_cache_of_another_depth_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="same model"):
        forward(tiny("two_digits"), [3], prefill(tiny("llama"), tokens(4)).cache)
