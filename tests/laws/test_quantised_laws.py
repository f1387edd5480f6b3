"""A cache in 8-bit integers, and models with weights in few bits: what is lost, and that nothing else is."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CONFIGS, FAMILIES, build, tiny, tokens

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import concat, overwrite, reposition, slice_cache, splice
from kvprobe.engine.quantised import Integers, quantise
from kvprobe.errors import UnsupportedError
from kvprobe.models.quantised import quantised
from kvprobe.models.subject import Subject

LENGTH = 16
NOISE = 3e-5


def filled(name: str, seed: int = 0, offset: int = 0) -> KVCache:
    return prefill(tiny(name), tokens(LENGTH, seed), offset=offset).cache


@pytest.mark.parametrize("name", FAMILIES)
@given(seed=st.integers(0, 99))
def test_every_number_is_restored_within_half_a_step(name: str, seed: int) -> None:
    kv = filled(name, seed)
    stored = quantise(kv)
    back = stored.restored(tiny(name))
    assert torch.equal(back.positions, kv.positions)
    for old, new in zip(kv.layers, back.layers, strict=True):
        for before, after, axis in ((old.keys, new.keys, 2), (old.values, new.values, 3)):
            step = before.abs().amax(axis, keepdim=True) / 127
            assert bool(((before - after).abs() <= step * 0.5001).all())
    assert quantise(back).restored(tiny(name)).layers[0].keys.allclose(back.layers[0].keys, atol=1e-6)
    assert stored.nbytes < 0.75 * kv.nbytes


@pytest.mark.parametrize("name", FAMILIES)
@given(steps=st.lists(st.integers(0, 5000), min_size=1, max_size=8))
def test_moving_before_or_after_quantising_is_the_same_bit_for_bit(name: str, steps: list[int]) -> None:
    """Codes are those of the keys first computed, wherever the cache stands when it is put to rest."""
    subject, kv = tiny(name), filled(name, offset=7)
    moved, again = kv, quantise(kv).restored(subject)
    for place in steps:
        moved, _ = reposition(subject, moved, place - int(moved.positions[0]))
        moved = quantise(moved).restored(subject)
        again, _ = reposition(subject, again, place - int(again.positions[0]))
    first = quantise(reposition(subject, kv, steps[0] - 7)[0]).restored(subject)
    assert first.fingerprint() == reposition(subject, quantise(kv).restored(subject), steps[0] - 7)[0].fingerprint()
    for one, other in zip(moved.layers, again.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=0)


def test_channels_of_zeros_and_outliers_stay_what_they_are() -> None:
    values = torch.tensor([[0.0, 1.0, -400.0], [0.0, -0.5, 3.0]])
    stored = Integers.of(values, 0)
    assert stored.codes.tolist() == [[0, 127, -127], [0, -64, 1]]
    back = stored.restored(torch.float32)
    assert back[:, 0].tolist() == [0, 0]
    assert back[0, 2] == -400
    with pytest.raises(UnsupportedError, match="Only a filled cache"):
        quantise(slice_cache(filled("qwen3"), ())[0])


@cache
def in_bits(name: str, weights: str) -> Subject:
    pytest.importorskip("torchao", reason="needs the extra `quantised`")
    return quantised(tiny(name), weights)


DENSE = [name for name in FAMILIES if not tiny(name).architecture.has_experts]


@pytest.mark.parametrize("name", DENSE)
def test_laws_hold_for_a_model_of_few_bits_as_for_any_other(name: str) -> None:
    subject, ids = in_bits(name, "int8"), tokens(LENGTH)
    full = prefill(subject, ids)
    assert overwrite(full.cache, range(3, 9), full.cache, no_op=True)[0].fingerprint() == full.cache.fingerprint()
    head, chunk = (slice_cache(full.cache, part)[0] for part in (range(4), range(4, 9)))
    tail, _ = reposition(subject, slice_cache(full.cache, range(9, LENGTH))[0], -5)
    whole, _ = splice(subject, concat(head, tail)[0], reposition(subject, chunk, 77)[0], at=4)
    assert whole.fingerprint() == full.cache.fingerprint()
    step = forward(subject, ids[10:], prefill(subject, ids[:10]).cache)
    torch.testing.assert_close(step.logits, full.logits, atol=NOISE, rtol=0)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_of_few_bits_is_the_model_with_its_rounded_weights(weights: str) -> None:
    pytest.importorskip("torchao", reason="needs the extra `quantised`")
    config = CONFIGS["qwen3"].__class__(**{**CONFIGS["qwen3"].to_dict(), "intermediate_size": 64})
    plain = build(config, "few")
    before = prefill(plain, tokens(LENGTH)).logits
    subject = quantised(plain, weights)
    with torch.no_grad():
        for own, few in zip(plain.model.modules(), subject.model.modules(), strict=True):
            if isinstance(own, torch.nn.Linear):
                step = own.weight.abs().max() / (127 if weights == "int8" else 7)
                rounded = few.weight.dequantize()
                assert 0 < float((rounded - own.weight).abs().max()) <= step
                own.weight.copy_(rounded)
    after = prefill(plain, tokens(LENGTH)).logits
    torch.testing.assert_close(prefill(subject, tokens(LENGTH)).logits, after, atol=NOISE, rtol=0)
    assert float((before - after).abs().max()) > 1e-3
    assert subject.identity.weights_sha256 != plain.identity.weights_sha256
    assert subject.identity.name == f"few-{weights}"


def test_experts_and_odd_widths_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="mixtures of experts"):
        quantised(tiny("mixtral"))
    pytest.importorskip("torchao", reason="needs the extra `quantised`")
    with pytest.raises(UnsupportedError, match="no multiple of 32"):
        quantised(tiny("qwen3"), "int4")
