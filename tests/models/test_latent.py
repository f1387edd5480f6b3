"""Multi-head latent attention: the latent is what is cached and moved, in the pair layout of each model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, tiny, tokens
from transformers.cache_utils import DynamicCache

from kvprobe.edit.hugging_face import imported
from kvprobe.engine.cache import KVCache
from kvprobe.engine.components import Components
from kvprobe.engine.forward import prefill
from kvprobe.engine.operations import reposition
from kvprobe.errors import UnsupportedError
from kvprobe.models.rotary import RotaryTable

NAMES = tuple(name for name, config in CONFIGS.items() if config.model_type.startswith("deepseek"))
LENGTH = 12
# Norms, routers and (DeepSeek-V2) the rotation are computed in float32 even in a float64 model.
ROUNDING = 1e-5


def attention_of(name: str, layer: int) -> Any:
    return tiny(name, torch.float64).model.model.layers[layer].self_attn


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_holds_one_rotary_key_and_one_latent_per_token(name: str) -> None:
    subject = tiny(name)
    config = subject.config
    cache = prefill(subject, tokens(LENGTH)).cache
    for layer in cache.layers:
        assert layer.keys.shape == (1, 1, LENGTH, config.qk_rope_head_dim)
        assert layer.values.shape == (1, 1, LENGTH, config.kv_lora_rank)
    per_token = cache.nbytes / LENGTH
    assert per_token == 4 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_the_first_layers_own_projections(name: str) -> None:
    """By hand: down-project, norm the latent, rotate the shared key by complex numbers in each model's layout."""
    subject, ids, offset = tiny(name, torch.float64), tokens(LENGTH), 19
    config, attention = subject.config, attention_of(name, 0)
    embedded = subject.model.model.layers[0].input_layernorm(subject.model.model.embed_tokens(torch.tensor([ids])))
    both = attention.kv_a_proj_with_mqa(embedded)
    latent = attention.kv_a_layernorm(both[..., : config.kv_lora_rank])
    raw = both[..., config.kv_lora_rank :]
    rotary = subject.model.model.rotary_emb
    adjacent_in = name != "deepseek_v3_split"
    pairs = (
        torch.view_as_complex(raw.unflatten(-1, (-1, 2)).contiguous())
        if adjacent_in
        else torch.complex(*raw.chunk(2, -1))
    )
    angles = (torch.arange(LENGTH) + offset).double()[:, None] * rotary.inv_freq.double()
    turned = pairs * torch.polar(torch.full_like(angles, rotary.attention_scaling), angles)
    adjacent_out = name == "deepseek_v2"
    expected = torch.view_as_real(turned).flatten(-2) if adjacent_out else torch.cat([turned.real, turned.imag], -1)
    first = prefill(subject, ids, offset=offset).cache.layers[0]
    torch.testing.assert_close(first.keys[:, 0], expected, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(first.values[:, 0], latent, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_moving_turns_the_rotary_keys_alone(name: str) -> None:
    subject = tiny(name, torch.float64)
    here = prefill(subject, tokens(LENGTH)).cache
    moved, receipt = reposition(subject, here, 31)
    assert all(mine.values is old.values for mine, old in zip(moved.layers, here.layers, strict=True))
    assert receipt.flops == 3 * LENGTH * subject.layers * subject.config.qk_rope_head_dim


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_the_other_pair_layout_gives_other_keys(name: str) -> None:
    subject = tiny(name, torch.float64)
    here, there = (prefill(subject, tokens(LENGTH), offset=offset).cache.layers[0].keys for offset in (0, 40))
    right = subject.architecture.rotary(subject.model)[0]
    wrong = RotaryTable(right.inverse_frequencies, right.scaling, not right.adjacent)
    turn = torch.full((LENGTH,), 40)
    assert float((right.rotate(here, turn) - there).abs().max()) < 1e-4
    assert float((wrong.rotate(here, turn) - there).abs().max()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_the_models_own_cache_is_taken_over_and_handed_back(name: str) -> None:
    subject, ids = tiny(name), tokens(LENGTH)
    past = DynamicCache()
    with torch.no_grad():
        subject.model(torch.tensor([ids]), past_key_values=past, use_cache=True)
    before = past.layers[0].keys.clone()
    taken = imported(subject, ids, past)
    ours = prefill(subject, ids[:-1]).cache
    for mine, other in zip(taken.layers, ours.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, atol=2e-5, rtol=0)
        torch.testing.assert_close(mine.values, other.values, atol=2e-5, rtol=0)
    assert torch.equal(past.layers[0].keys, before)
    handed = subject.architecture.model_cache(ours.to_hugging_face())
    assert KVCache.from_hugging_face(subject.architecture.own_cache(handed)).fingerprint() == ours.fingerprint()
    with torch.no_grad():
        written = subject.model.generate(torch.tensor([ids]), past_key_values=handed, max_new_tokens=4, do_sample=False)
        plain = subject.model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    assert torch.equal(written, plain)


@pytest.mark.parametrize("name", NAMES)
def test_a_bridge_that_caches_expanded_heads_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="caches the expanded keys and values"):
        Components(tiny(name))


def test_bytes_per_token_of_the_latent_and_of_what_it_stands_for() -> None:
    """DeepSeek-V2 and V3 at their published sizes: 576 numbers a layer for 128 heads of 192 and 128."""
    from transformers import DeepseekV3Config

    from kvprobe.models.architectures.latent import LatentAttention

    config = DeepseekV3Config()
    latent, expanded = LatentAttention().numbers_per_token(config)
    assert (latent, expanded) == (512 + 64, 128 * (192 + 128))
    assert expanded / latent == pytest.approx(71.1, abs=0.05)
