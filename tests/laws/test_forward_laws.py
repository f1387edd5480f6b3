"""Forward passes against prefill and against a plain Hugging Face float64 forward."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import CONFIGS, FAMILIES, WINDOW, WINDOWED, build, rounds_to_float32, tiny, tokens

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.interventions import AttentionKnockout
from kvprobe.engine.operations import append, recompute, slice_cache
from kvprobe.errors import NoEffectError, NumericsError, UnsupportedError
from kvprobe.models.caching import check_fills_cache

LENGTH = 18


def tolerance(name: str) -> float:
    """Float64 rounding, or float32 rounding where the library itself rounds to it."""
    return 1e-5 if rounds_to_float32(name) else 1e-12


def plain_logits(name: str, ids: list[int]) -> torch.Tensor:
    """The model library's own forward in float64: no cache, no mask, no positions of ours."""
    with torch.no_grad():
        return tiny(name, torch.float64).model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def worst(a: KVCache, b: KVCache) -> float:
    """Largest difference of keys or values."""
    return max(
        max(float((x.keys - y.keys).abs().max()), float((x.values - y.values).abs().max()))
        for x, y in zip(a.layers, b.layers, strict=True)
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, LENGTH])
def test_prefill_equals_a_plain_hugging_face_forward(name: str, length: int) -> None:
    ids = tokens(length)
    ours = prefill(tiny(name, torch.float64), ids)
    torch.testing.assert_close(ours.logits, plain_logits(name, ids), atol=tolerance(name), rtol=0)
    assert prefill(tiny(name), ids).logits.dtype == torch.float32
    assert len(ours.cache) == ours.receipt.tokens_appended == length


@pytest.mark.parametrize("name", FAMILIES)
@given(cut=st.integers(1, LENGTH - 1), more=st.integers(1, LENGTH), seed=st.integers(0, 99))
@example(cut=WINDOW - 1, more=1, seed=0)
@example(cut=WINDOW, more=1, seed=0)
@example(cut=WINDOW + 1, more=1, seed=0)
def test_cached_forward_equals_full_forward(name: str, cut: int, more: int, seed: int) -> None:
    subject, ids = tiny(name, torch.float64), tokens(cut + more, seed)
    first = prefill(subject, ids[:cut])
    rest = forward(subject, ids[cut:], first.cache)
    torch.testing.assert_close(rest.logits, plain_logits(name, ids), atol=tolerance(name), rtol=0)
    assert worst(rest.cache, prefill(subject, ids).cache) < tolerance(name)
    assert (rest.receipt.tokens_reused, rest.receipt.tokens_appended) == (cut, more)


@pytest.mark.parametrize("name", FAMILIES)
def test_recomputing_everything_equals_prefill_bit_for_bit(name: str) -> None:
    subject, ids = tiny(name), tokens(LENGTH)
    stale = prefill(subject, tokens(LENGTH, seed=8)).cache
    fresh, receipt = recompute(subject, stale, ids, range(LENGTH))
    assert fresh.fingerprint() == prefill(subject, ids).cache.fingerprint()
    assert (receipt.tokens_recomputed, receipt.tokens_reused) == (LENGTH, 0)


@pytest.mark.parametrize("name", FAMILIES)
@given(start=st.integers(0, LENGTH - 1), data=st.data())
def test_recompute_of_a_valid_cache_changes_nothing(name: str, start: int, data: st.DataObject) -> None:
    subject, ids = tiny(name, torch.float64), tokens(LENGTH)
    cache = prefill(subject, ids).cache
    places = data.draw(st.sets(st.integers(start, LENGTH - 1), min_size=1))
    again, receipt = recompute(subject, cache, ids, places)
    assert worst(again, cache) < tolerance(name)
    assert receipt.tokens_recomputed == len(places)


@pytest.mark.parametrize("name", FAMILIES)
@given(start=st.integers(1, LENGTH - 4), length=st.integers(1, 3))
def test_recomputing_a_changed_span_gives_its_true_entries(name: str, start: int, length: int) -> None:
    """The field's own tokens see only an unchanged prefix, so in-place recomputation is exact there."""
    subject, ids = tiny(name, torch.float64), tokens(LENGTH)
    edited = list(ids)
    edited[start : start + length] = tokens(length, seed=5)
    span, upto = range(start, start + length), range(start + length)
    stale = prefill(subject, ids).cache
    patched, _ = recompute(subject, stale, edited, span)
    oracle = prefill(subject, edited).cache
    assert worst(slice_cache(patched, upto)[0], slice_cache(oracle, upto)[0]) < tolerance(name)
    rest = range(start + length, LENGTH)
    assert worst(slice_cache(patched, rest)[0], slice_cache(stale, rest)[0]) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_append_equals_prefill_of_the_longer_text(name: str) -> None:
    subject, ids = tiny(name, torch.float64), tokens(LENGTH)
    longer, receipt = append(subject, prefill(subject, ids[:10]).cache, ids[10:])
    assert worst(longer, prefill(subject, ids).cache) < tolerance(name)
    assert receipt.tokens_appended == LENGTH - 10
    assert receipt.flops > 0
    assert receipt.seconds > 0


def test_flops_count_visible_keys_only() -> None:
    full, windowed = CONFIGS["two_digits"], CONFIGS["mistral"]
    for name, config, attended in (("two_digits", full, 10 * 11 // 2), ("mistral", windowed, 10 * 11 // 2 - 6)):
        subject = tiny(name)
        adapter = subject.architecture
        expected = (
            10 * adapter.flops_per_token(config)
            + config.num_hidden_layers * attended * adapter.flops_per_attended_key(config)
            + adapter.flops_per_logits(config)
        )
        assert prefill(subject, tokens(10)).receipt.flops == expected
        linear = sum(p.numel() for n, p in subject.model.named_parameters() if "proj" in n)
        assert adapter.flops_per_token(config) == 2 * linear


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_hides_a_key_at_exactly_its_distance(name: str) -> None:
    subject = tiny(name)
    seen = subject.architecture.visible(
        subject.config, torch.tensor([20]), torch.arange(21), torch.ones(1, 21, dtype=torch.bool)
    )["sliding_attention"][0]
    assert int(seen.sum()) == WINDOW
    assert not seen[20 - WINDOW]
    assert seen[20 - WINDOW + 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exception_in_the_middle_leaves_the_model_as_it_was(name: str) -> None:
    subject = build(CONFIGS[name], name)
    ids = tokens(LENGTH)
    before = prefill(subject, ids).logits
    weights = _weights_hash(subject.model)

    def explode(*_: Any) -> None:
        raise RuntimeError("boom")

    layer = subject.architecture.decoder_layers(subject.model)[1]
    bomb = layer.mlp.register_forward_hook(explode)
    with pytest.raises(RuntimeError, match="boom"):
        forward(subject, ids, knockouts=[AttentionKnockout((LENGTH - 1,), (LENGTH - 2,))])
    bomb.remove()
    assert not any(module._forward_pre_hooks for module in subject.architecture.decoder_layers(subject.model))
    assert torch.equal(prefill(subject, ids).logits, before)
    assert _weights_hash(subject.model) == weights


def test_a_knockout_of_other_queries_or_hidden_keys_is_refused() -> None:
    subject, ids = tiny("mistral"), tokens(LENGTH)
    with pytest.raises(NoEffectError, match="hides nothing"):
        forward(subject, ids, knockouts=[AttentionKnockout((LENGTH - 1,), (0,))])
    with pytest.raises(UnsupportedError, match="without any visible key in layer 0"):
        forward(subject, ids, knockouts=[AttentionKnockout((3,), (0, 1, 2, 3))])


def test_infinite_logits_raise() -> None:
    subject = build(CONFIGS["qwen3"], "broken")
    with torch.no_grad():
        subject.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="broken gives NaN"):
        prefill(subject, tokens(4))


def test_a_forward_pass_needs_tokens_and_fitting_positions() -> None:
    subject = tiny("qwen3")
    with pytest.raises(UnsupportedError, match="at least one token"):
        prefill(subject, [])
    with pytest.raises(UnsupportedError, match="2 tokens and 1 positions"):
        forward(subject, [3, 4], positions=[0])
    with pytest.raises(UnsupportedError, match="eager"):
        prefill(subject, [3, 4], attention=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_model_fills_a_cache_handed_to_it(name: str) -> None:
    check_fills_cache(tiny(name).model)


def test_a_model_that_drops_its_cache_is_refused() -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny("qwen3").model

        def forward(self, ids: torch.Tensor, **_: Any) -> Any:
            return self.inner(ids, use_cache=False)

    with pytest.raises(UnsupportedError, match=r"leaves 0 in its KV cache.*below 5\.24"):
        check_fills_cache(Dropping())


def _weights_hash(model: Any) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
