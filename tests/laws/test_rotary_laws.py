"""Moving keys: additive, exact against a native prefill, values untouched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, FAMILIES, WINDOW, build, tiny, tokens
from transformers import LlamaConfig, PhiConfig, PhiForCausalLM

from kvprobe.baselines.mlp import logits_at
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import append, reposition, splice
from kvprobe.errors import UnsupportedError
from kvprobe.models.rotary import RotaryTable
from kvprobe.models.subject import Subject, reach_of
from kvprobe.probes.composing.compose_latency.requests import run_plain

LENGTH = 9
STEPS = st.integers(0, 90)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(a=STEPS, b=st.integers(-90, 90))
def test_repositions_add_up_bit_for_bit(name: str, dtype: torch.dtype, a: int, b: int) -> None:
    subject = tiny(name, dtype)
    cache = prefill(subject, tokens(LENGTH), offset=90).cache
    twice = reposition(subject, reposition(subject, cache, a)[0], b)[0]
    once = reposition(subject, cache, a + b)[0]
    assert twice.fingerprint() == once.fingerprint()
    back = reposition(subject, twice, -a - b)[0]
    assert back.fingerprint() == cache.fingerprint()


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(length=st.sampled_from([WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2]), end=st.integers(24, 109))
def test_a_moved_cache_is_that_of_a_native_prefill(name: str, length: int, end: int) -> None:
    """Relative positions are all a RoPE model sees, so the whole prefill moves, at every layer, and decides alike."""
    subject, ids, delta = tiny(name, torch.float64), tokens(length), end - length
    here, there = (prefill(subject, ids, offset=offset).cache for offset in (0, delta))
    moved, receipt = reposition(subject, here, delta)
    assert torch.equal(moved.positions, there.positions)
    assert receipt.tokens_rotated == length
    decided, native = (forward(subject, [7], cache).logits for cache in (moved, there))
    torch.testing.assert_close(decided, native, atol=1e-4, rtol=0)
    # The library rounds its angles, and later layers carry that on over all they attend to.
    close = 2e-5 if length <= LENGTH else 1e-4
    for mine, native, old in zip(moved.layers, there.layers, here.layers, strict=True):
        torch.testing.assert_close(mine.keys, native.keys, atol=close, rtol=close)
        assert torch.equal(mine.values, old.values)
        assert not torch.equal(mine.keys, old.keys)


@pytest.mark.parametrize("name", FAMILIES)
def test_entries_appended_to_a_moved_cache_keep_their_own_origin(name: str) -> None:
    subject = tiny(name)
    moved, _ = reposition(subject, prefill(subject, tokens(LENGTH)).cache, 5)
    longer, _ = append(subject, moved, [4, 5])
    assert longer.positions.tolist() == list(range(5, LENGTH + 7))
    assert longer.source_positions.tolist() == [*range(LENGTH), LENGTH + 5, LENGTH + 6]
    back, _ = reposition(subject, longer, -5)
    original = prefill(subject, tokens(LENGTH)).cache
    assert torch.equal(back.layers[0].keys[:, :, :LENGTH], original.layers[0].keys)


@pytest.mark.parametrize("name", ["llama_yarn", "deepseek_v2", "deepseek_v3"])
def test_yarn_scaling_of_keys_does_not_enter_the_rotation(name: str) -> None:
    subject = tiny(name, torch.float64)
    assert subject.model.model.rotary_emb.attention_scaling > 1.05
    cache = prefill(subject, tokens(LENGTH)).cache
    moved, _ = reposition(subject, cache, 50)
    for mine, old in zip(moved.layers, cache.layers, strict=True):
        torch.testing.assert_close(mine.keys.norm(dim=-1), old.keys.norm(dim=-1), atol=1e-6, rtol=1e-6)


def test_llama3_frequencies_are_the_adjusted_ones() -> None:
    table = tiny("llama").architecture.rotary(tiny("llama").model)[0]
    plain = 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)
    ratio = plain / table.inverse_frequencies
    assert ratio[0] == 1
    assert torch.isclose(ratio[-1], torch.tensor(8.0))
    assert bool((ratio[1:] >= ratio[:-1]).all())


def test_two_bases_give_each_layer_type_its_own_table() -> None:
    local, full, again = tiny("gemma3").architecture.rotary(tiny("gemma3").model)
    assert (local.scaling, full.scaling, again.scaling) == ("default", "linear", "default")
    assert not torch.equal(local.inverse_frequencies, full.inverse_frequencies)
    assert torch.equal(local.inverse_frequencies, again.inverse_frequencies)


def test_partial_rotary_turns_the_first_channels_only() -> None:
    config = PhiConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = PhiForCausalLM(config).double().eval()
    table = RotaryTable.from_module(model.model.rotary_emb)
    assert table.rotary_dim == 4
    ids = torch.tensor([tokens(LENGTH)])
    caches = []
    for offset in (0, 23):
        with torch.no_grad():
            past = model(ids, position_ids=torch.arange(LENGTH)[None] + offset, use_cache=True).past_key_values
        caches.append(KVCache.from_hugging_face(past))
    for here, there in zip(caches[0].layers, caches[1].layers, strict=True):
        moved = table.rotate(here.keys, torch.full((LENGTH,), 23))
        torch.testing.assert_close(moved, there.keys, atol=1e-5, rtol=1e-5)
        assert torch.equal(moved[..., 4:], here.keys[..., 4:])


@pytest.mark.parametrize("scaling", ["dynamic", "longrope", "never_heard_of"])
def test_scalings_that_cannot_be_moved_are_refused(scaling: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{scaling}'"):
        RotaryTable(torch.ones(4), scaling)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}, 32),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 16,
            },
            16,
        ),
    ],
)
def test_passes_beyond_the_length_at_which_frequencies_change_are_refused(scaling: dict[str, Any], limit: int) -> None:
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        rope_parameters=scaling,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    subject, ids = build(config, "changing", torch.float64), tokens(limit + 1)
    below = prefill(subject, ids[:-1])
    with torch.no_grad():
        native = subject.model(torch.tensor([ids[:-1]]), use_cache=False)
        plain = subject.model(torch.tensor([ids]), use_cache=False)
    torch.testing.assert_close(below.logits, native.logits[0, -1], atol=1e-12, rtol=0)
    for cache, run in ((None, ids), (below.cache, ids[-1:])):
        with pytest.raises(UnsupportedError, match=f"changes its frequencies beyond {limit} tokens"):
            forward(subject, run, cache)
    # What is refused would have been wrong: the library's own decoding is not its own prefill there.
    with torch.no_grad():
        step = subject.model(torch.tensor([ids[-1:]]), past_key_values=below.cache.to_hugging_face())
    assert float((step.logits[0, -1] - plain.logits[0, -1]).abs().max()) > 1e-3


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
BY_LAYER = {"sliding_attention": DYNAMIC, "full_attention": {**DYNAMIC, "rope_theta": 1000.0}}


@pytest.mark.parametrize(("family", "rope"), [("llama", DYNAMIC), ("gemma3", BY_LAYER)])
@pytest.mark.parametrize("length", [32, 31, 5])
def test_a_long_pass_outside_leaves_no_frequencies_behind(family: str, rope: dict[str, Any], length: int) -> None:
    shape = CONFIGS[family].to_dict() | {"rope_parameters": rope, "max_position_embeddings": 32}
    subject = build(type(CONFIGS[family])(**shape), "dynamic", torch.float64)
    before = prefill(subject, tokens(length))
    with torch.no_grad():
        subject.model(torch.tensor([tokens(60)]), use_cache=False)
    after = prefill(subject, tokens(length))
    assert after.cache.fingerprint() == before.cache.fingerprint()
    assert torch.equal(after.logits, before.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_a_model_lacks_are_refused_unless_one_insists(family: str) -> None:
    subject = replace(tiny(family), extrapolates=False)
    reach, ids = subject.config.max_position_embeddings, tokens(6)
    last = prefill(subject, ids, offset=reach - 6).cache
    refused = rf"has {reach} positions and a token would stand at position {reach}.*extrapolate"
    attempts: list[Callable[[Subject], Any]] = [
        lambda model: prefill(model, ids, offset=reach - 5),
        lambda model: forward(model, ids[:1], last),
        lambda model: reposition(model, last, 1),
        lambda model: splice(model, last, prefill(model, ids[:1]).cache, reach - 2),
    ]
    for attempt in attempts:
        with pytest.raises(UnsupportedError, match=refused):
            attempt(subject)
        attempt(subject.extrapolating())


def test_a_module_without_frequencies_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no inverse frequencies"):
        RotaryTable.from_module(torch.nn.Linear(2, 2), "full_attention")


def test_bfloat16_round_trip_stays_within_one_rounding() -> None:
    keys = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = RotaryTable(1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8))
    delta = torch.full((5,), 77)
    there = table.rotate(keys, delta)
    assert there.dtype == torch.bfloat16
    assert float((table.rotate(there, -delta) - keys).abs().max()) < 4e-2
    assert torch.equal(table.rotate(keys, torch.zeros(5, dtype=torch.long)), keys)


@pytest.mark.parametrize(("stated", "original", "reach"), [(32, 32, 128), (128, 32, 128), (32, None, 128)])
def test_yarn_gives_a_model_the_positions_it_stretches_to(stated: int, original: int | None, reach: int) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    assert reach_of(SimpleNamespace(max_position_embeddings=stated, rope_parameters=rope)) == reach


def test_a_model_called_outside_the_engine_reaches_no_further() -> None:
    subject = replace(tiny("qwen3"), extrapolates=False)
    reach = subject.config.max_position_embeddings
    within, beyond = tokens(reach), tokens(reach + 1)
    for call in (lambda ids: run_plain(subject, ids), lambda ids: logits_at(subject, [ids[:4], ids], [(1, 3)])):
        call(within)
        with pytest.raises(UnsupportedError, match=f"has {reach} positions"):
            call(beyond)
