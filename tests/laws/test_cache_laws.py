"""Laws of slice, concat and overwrite, on every architecture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny, tokens

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import append, concat, overwrite, recompute, reposition, slice_cache, splice
from kvprobe.errors import NoEffectError, UnsupportedError

LENGTH = 14


def base_and_donor(name: str, changed_at: int = 3) -> tuple[list[int], list[int], KVCache, KVCache]:
    base = tokens(LENGTH)
    donor = list(base)
    donor[changed_at] = 3 + (base[changed_at] - 2) % 50
    subject = tiny(name)
    return base, donor, prefill(subject, base).cache, prefill(subject, donor).cache


@pytest.mark.parametrize("name", FAMILIES)
@given(places=st.sets(st.integers(0, LENGTH - 1), min_size=1))
def test_self_transplant_is_the_identity_bit_equal(name: str, places: set[int]) -> None:
    _, _, cache, _ = base_and_donor(name)
    same, receipt = overwrite(cache, places, cache, no_op=True)
    assert same.fingerprint() == cache.fingerprint()
    assert (receipt.tokens_copied, receipt.tokens_reused) == (len(places), LENGTH - len(places))


@pytest.mark.parametrize("name", FAMILIES)
@given(cut=st.integers(0, LENGTH))
def test_slice_then_concat_is_the_identity(name: str, cut: int) -> None:
    _, _, cache, _ = base_and_donor(name)
    left, _ = slice_cache(cache, range(cut))
    right, _ = slice_cache(cache, range(cut, LENGTH))
    whole, receipt = concat(left, right)
    assert whole.fingerprint() == cache.fingerprint()
    assert receipt.tokens_reused == LENGTH


@pytest.mark.parametrize("name", FAMILIES)
def test_overwriting_everything_with_the_donor_is_the_donor(name: str) -> None:
    _, _, cache, donor = base_and_donor(name)
    whole, _ = overwrite(cache, range(LENGTH), donor)
    assert whole.fingerprint() == donor.fingerprint()
    following = forward(tiny(name), [5], whole).logits
    assert torch.equal(following, forward(tiny(name), [5], donor).logits)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_overwrite_changes_exactly_the_asked_entries_and_layers(name: str, data: st.DataObject) -> None:
    _, _, cache, donor = base_and_donor(name)
    places = data.draw(st.sets(st.integers(0, LENGTH - 1), min_size=1))
    layers = data.draw(st.sets(st.integers(0, len(cache.layers) - 1), min_size=1))
    patched, _ = overwrite(cache, sorted(places), donor, layers=sorted(layers), no_op=True)
    if patched.fingerprint() == cache.fingerprint():
        with pytest.raises(NoEffectError, match="changes nothing"):
            overwrite(cache, sorted(places), donor, layers=sorted(layers))
    else:
        overwrite(cache, sorted(places), donor, layers=sorted(layers))
    for number, (new, old, other) in enumerate(zip(patched.layers, cache.layers, donor.layers, strict=True)):
        for place in range(LENGTH):
            source = other if number in layers and place in places else old
            assert torch.equal(new.keys[:, :, place], source.keys[:, :, place])
            assert torch.equal(new.values[:, :, place], source.values[:, :, place])


@pytest.mark.parametrize("name", FAMILIES)
def test_no_operation_mutates_its_inputs(name: str) -> None:
    subject = tiny(name)
    ids, _, cache, donor = base_and_donor(name)
    moved, _ = reposition(subject, cache, 9)
    inputs = (cache, donor, moved)
    before = [item.fingerprint() for item in inputs]
    slice_cache(cache, range(2, 5))
    concat(cache, reposition(subject, donor, LENGTH)[0])
    overwrite(cache, range(3, 9), donor)
    recompute(subject, cache, ids, range(4, 8))
    append(subject, cache, tokens(4, seed=1))
    append(subject, moved, tokens(4, seed=1))
    reposition(subject, moved, 3)
    splice(subject, cache, donor, at=5)
    forward(subject, [4, 5], cache)
    past = subject.architecture.model_cache(cache.to_hugging_face())
    with torch.no_grad():
        subject.model(torch.tensor([[4, 5, 6]]), past_key_values=past, use_cache=True)
    assert [item.fingerprint() for item in inputs] == before


@pytest.mark.parametrize("name", FAMILIES)
def test_conversion_to_hugging_face_and_back_is_the_identity(name: str) -> None:
    _, _, cache, _ = base_and_donor(name)
    assert KVCache.from_hugging_face(cache.to_hugging_face()).fingerprint() == cache.fingerprint()


def test_two_digit_layers_keep_their_order() -> None:
    subject = tiny("two_digits")
    _, _, cache, donor = base_and_donor("two_digits")
    assert len(cache.layers) == subject.layers == 12
    patched, _ = overwrite(cache, [3], donor, layers=[2, 10])
    changed = [n for n, (a, b) in enumerate(zip(patched.layers, cache.layers, strict=True)) if a is not b]
    assert changed == [2, 10]
    assert torch.equal(patched.layers[10].keys[:, :, 3], donor.layers[10].keys[:, :, 3])


def test_refusals_name_what_is_wrong() -> None:
    _, _, cache, donor = base_and_donor("qwen3")
    _, _, other, _ = base_and_donor("wide_heads")
    with pytest.raises(UnsupportedError, match="no entry at position 99"):
        slice_cache(cache, [99])
    with pytest.raises(UnsupportedError, match="would follow position 13"):
        concat(cache, donor)
    with pytest.raises(UnsupportedError, match="different models"):
        overwrite(cache, [1], other)
    with pytest.raises(UnsupportedError, match="no layer 7"):
        overwrite(cache, [1], donor, layers=[7])
    with pytest.raises(UnsupportedError, match="position -1"):
        reposition(tiny("qwen3"), cache, -1)
    with pytest.raises(UnsupportedError, match="chunk is empty"):
        splice(tiny("qwen3"), cache, slice_cache(cache, ())[0], at=2)
    with pytest.raises(UnsupportedError, match="3 tokens for a cache of 14"):
        recompute(tiny("qwen3"), cache, [1, 2, 3], [0])
    with pytest.raises(UnsupportedError, match="nothing to concatenate"):
        concat()
