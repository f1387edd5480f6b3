"""Sliding windows: chunks below, at and above the window, spliced and moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, WINDOW, WINDOWED, rounds_to_float32, tiny, tokens

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import concat, reposition, slice_cache, splice

AROUND = [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 2]
# All layers slide, so that what a token can know of the past ends somewhere.
ALL_SLIDE = ("mistral", "mixtral")


def differences(a: KVCache, b: KVCache, layer: int) -> torch.Tensor:
    """`[position]`: largest difference of keys or values of one layer."""
    one, other = a.layers[layer], b.layers[layer]
    keys = (one.keys - other.keys).abs().amax((0, 1, 3))
    return torch.maximum(keys, (one.values - other.values).abs().amax((0, 1, 3)))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(
    length=st.sampled_from([1, *AROUND]),
    before=st.integers(1, 2 * WINDOW),
    after=st.integers(0, WINDOW + 1),
    away=st.integers(0, 500),
)
def test_splice_at_its_own_place_equals_prefill(name: str, length: int, before: int, after: int, away: int) -> None:
    subject, ids = tiny(name), tokens(before + length + after)
    full = prefill(subject, ids).cache
    end = before + length
    chunk, _ = slice_cache(full, range(before, end))
    head, _ = slice_cache(full, range(before))
    tail, _ = reposition(subject, slice_cache(full, range(end, len(ids)))[0], -length)
    whole, receipt = splice(subject, concat(head, tail)[0], reposition(subject, chunk, away)[0], at=before)
    assert whole.fingerprint() == full.fingerprint()
    assert receipt.tokens_rotated == length * (away > 0) + after
    step, native = (forward(subject, [7], cache).logits for cache in (whole, full))
    assert torch.equal(step, native)


@pytest.mark.parametrize("name", ALL_SLIDE)
@given(before=st.integers(WINDOW, 3 * WINDOW), seed=st.integers(0, 50))
def test_an_isolated_chunk_is_native_from_where_its_windows_no_longer_reach_out_of_it(
    name: str, before: int, seed: int
) -> None:
    """Entries of layer n know of n times WINDOW - 1 tokens before them: later ones of a long chunk are exact."""
    subject = tiny(name, torch.float64)
    reach = (subject.layers - 1) * (WINDOW - 1)
    ids = tokens(before + reach + 4, seed)
    full, _ = slice_cache(prefill(subject, ids).cache, range(before, len(ids)))
    chunk, _ = reposition(subject, prefill(subject, ids[before:]).cache, before)
    for layer in range(subject.layers):
        apart = differences(chunk, full, layer)
        assert float(apart[layer * (WINDOW - 1) :].max()) < 1e-4
        if layer:
            assert float(apart[layer * (WINDOW - 1) - 1]) > 1e-3


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW - 1, WINDOW, 2 * WINDOW])
def test_what_follows_a_spliced_chunk_sees_its_last_window_and_no_more(name: str, length: int) -> None:
    """A token after the chunk reads through sliding layers only what stands in its window, wherever it came from."""
    subject, ids = tiny(name, torch.float64), tokens(WINDOW + length + 1)
    full = prefill(subject, ids[:-1])
    chunk, _ = slice_cache(full.cache, range(WINDOW, WINDOW + length))
    head, _ = slice_cache(full.cache, range(WINDOW))
    whole, _ = splice(subject, head, reposition(subject, chunk, 90)[0], at=WINDOW)
    with torch.no_grad():
        plain = subject.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    exact = 1e-5 if rounds_to_float32(name) else 1e-12
    torch.testing.assert_close(forward(subject, ids[-1:], whole).logits, plain, atol=exact, rtol=0)
    seen = subject.architecture.visible(
        subject.config,
        torch.tensor([len(ids) - 1]),
        torch.arange(len(ids)),
        torch.ones(1, len(ids), dtype=torch.bool),
    )["sliding_attention"][0]
    assert int(seen.sum()) == min(WINDOW, len(ids))
    assert int(seen[WINDOW : WINDOW + length].sum()) == min(length, WINDOW - 1)
