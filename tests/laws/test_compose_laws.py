"""Composing: a chunk at its own place is the prefill, caches are never written into, and receipts say what was run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr
from tiny_models import FAMILIES, tiny, tokens

from kvprobe.composing.base import REUSE_SCHEMES, Composition, Part, ReuseScheme, compose, make_scheme
from kvprobe.composing.chunk import Chunk, precompile
from kvprobe.composing.prompts import as_cached_prompt, compile_segment, composition_of, merged
from kvprobe.edit.meter import Meter
from kvprobe.engine.agreement import agreement
from kvprobe.engine.forward import prefill
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.models.subject import Subject
from kvprobe.tasks.context import Span, TokenizedContext

IDS = tokens(24)
SPANS = {"system": Span(1, 5), "policy": Span(5, 14), "session": Span(14, 18), "task": Span(18, 24)}
PROMPT = TokenizedContext(tuple(IDS), SPANS, "")
NOISE = 3e-5
EXACT = 5e-6
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "splice": ("splice", {}),
    "seam": ("splice", {"seam": 3}),
    "epic": ("epic", {"tokens": 2}),
    "prompt_cache": ("prompt_cache", {"slot": 8}),
    "cacheblend": ("cacheblend", {"share": 0.3}),
    "no_rotation": ("no_rotation", {}),
    "full_prefill": ("full_prefill", {}),
}


def scheme(variant: str) -> ReuseScheme:
    name, parameters = SCHEMES[variant]
    return make_scheme(name, **parameters)


def logits(subject: Subject, *args: Any, **kwargs: Any) -> torch.Tensor:
    return compose(subject, *args, **kwargs).decide(subject).logits


def test_every_scheme_has_a_row_here() -> None:
    assert {name for name, _ in SCHEMES.values()} == set(REUSE_SCHEMES.names())
    assert all(REUSE_SCHEMES.describe().values())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chunk_compiled_in_its_place_is_the_prefill(name: str) -> None:
    subject = tiny(name, torch.float64)
    chunk = compile_segment(subject, PROMPT, "policy", "real")
    expected = prefill(subject, IDS)
    for variant in SCHEMES:
        if variant == "prompt_cache":
            continue
        composed = scheme(variant).compose(subject, composition_of(PROMPT, {"policy": chunk}))
        assert composed.is_contiguous
        assert torch.allclose(composed.decide(subject).logits, expected.logits, atol=EXACT, rtol=0)
    moved = compose(subject, composition_of(PROMPT, {"policy": chunk}).parts)
    kept = moved.cache.take(slice(5, 14))
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(kept.layers, chunk.cache.layers, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_repairing_the_whole_chunk_is_the_prefill(name: str) -> None:
    subject = tiny(name, torch.float64)
    chunk = precompile(subject, IDS[5:14], "none")
    parts = composition_of(PROMPT, {"policy": chunk}).parts
    for given_scheme, more in (("splice", {"seam": 9}), ("cacheblend", {"share": 1.0}), ("full_prefill", {})):
        found = logits(subject, parts, given_scheme, **more)
        assert torch.allclose(found, prefill(subject, IDS).logits, atol=EXACT, rtol=0), given_scheme


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("variant", SCHEMES)
def test_receipts_say_what_was_run_and_chunks_are_untouched(name: str, variant: str) -> None:
    subject = tiny(name)
    chunk = precompile(subject, IDS[5:14], "none")
    print_before = chunk.cache.fingerprint()
    with Meter(subject) as meter:
        composed = scheme(variant).compose(subject, composition_of(PROMPT, {"policy": chunk}))
    receipt = composed.receipt
    declared = receipt.tokens_appended + receipt.tokens_recomputed
    assert declared == pytest.approx(meter.tokens, abs=1)
    assert chunk.cache.fingerprint() == print_before
    assert len(composed.cache) == len(IDS) - 1
    reused = [index for index in range(len(IDS) - 1) if index not in composed.computed]
    assert set(reused) <= set(range(5, 14))
    for ours, theirs in zip(composed.cache.layers, chunk.cache.layers, strict=True):
        for index in reused:
            assert torch.equal(ours.values[:, :, index], theirs.values[:, :, index - 5])


@settings(max_examples=15, deadline=None)
@given(shift=st.integers(0, 60), seam=st.integers(0, 9), name=st.sampled_from(FAMILIES))
def test_a_moved_chunk_has_the_keys_of_a_prefill_there(shift: int, seam: int, name: str) -> None:
    subject = tiny(name, torch.float64)
    chunk = precompile(subject, IDS[5:14], "none")
    parts = [Part("before", tuple(tokens(shift + 1, 1))), Part.reused("policy", chunk), Part("task", tuple(IDS[18:]))]
    composed = compose(subject, parts, "splice", seam=seam)
    there = prefill(subject, IDS[5:14], offset=shift + 1).cache
    moved = composed.cache.take(slice(shift + 1 + seam, shift + 10))
    for ours, theirs in zip(moved.layers, there.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys[:, :, seam:], atol=NOISE, rtol=0)


def test_without_rotation_keys_stay_and_the_decision_moves() -> None:
    subject = tiny("llama", torch.float64)
    chunk = precompile(subject, IDS[5:14], "none")
    parts = composition_of(PROMPT, {"policy": chunk}).parts
    still = compose(subject, parts, "no_rotation")
    assert torch.equal(still.cache.layers[1].keys[:, :, 5:14], chunk.cache.layers[1].keys)
    assert not torch.allclose(still.decide(subject).logits, logits(subject, parts, "splice"), atol=1e-3)


def test_prompt_cache_leaves_gaps_and_cannot_be_edited() -> None:
    subject = tiny("qwen3")
    chunk = precompile(subject, IDS[5:14], "none")
    composed = compose(subject, composition_of(PROMPT, {"policy": chunk}).parts, "prompt_cache", slot=8)
    assert composed.cache.positions.tolist() == [*range(5), *range(8, 17), *range(17, 26)]
    with pytest.raises(UnsupportedError, match="gaps"):
        as_cached_prompt(composed)


def test_neighbouring_segments_can_be_one_chunk_that_is_edited_inside() -> None:
    subject = tiny("qwen3", torch.float64)
    whole = merged(PROMPT, "skill", ["system", "policy"])
    assert list(whole.spans) == ["skill", "session", "task"]
    chunk = compile_segment(subject, whole, "skill", "real")
    composed = compose(subject, composition_of(whole, {"skill": chunk}).parts)
    cached = as_cached_prompt(composed, SPANS)
    assert torch.allclose(cached.decide(subject).logits, prefill(subject, IDS).logits, atol=EXACT, rtol=0)
    assert cached.span("policy") == SPANS["policy"]
    with pytest.raises(ConfigError, match="do not follow"):
        merged(PROMPT, "skill", ["system", "session"])
    with pytest.raises(ConfigError, match="already"):
        merged(PROMPT, "task", ["system", "policy"])


def test_headers_are_dropped_and_refused_where_there_is_none() -> None:
    subject = tiny("qwen3")
    ids = tuple(IDS[5:14])
    behind = precompile(subject, ids, "real", before=IDS[:5])
    alone = precompile(subject, ids, "none")
    assert behind.cache.positions.tolist() == [*range(5, 14)]
    assert alone.cache.positions.tolist() == [*range(9)]
    with pytest.raises(ConfigError, match="real"):
        precompile(subject, ids, "real")
    with pytest.raises(ConfigError, match="no header 'bso'"):
        precompile(subject, ids, "bso")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="empty"):
        precompile(subject, ())


def test_a_composition_must_end_in_something_to_run() -> None:
    chunk = Chunk((1, 2), prefill(tiny("qwen3"), (1, 2)).cache)
    with pytest.raises(ConfigError, match="must be run to decide"):
        Composition((Part("a", (1,)), Part.reused("b", chunk)))
    with pytest.raises(ConfigError, match="no name twice"):
        Composition((Part("a", (1,)), Part("a", (2,))))
    with pytest.raises(ConfigError, match="no segment 'polcy'"):
        composition_of(PROMPT, {"polcy": chunk})


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 20))
def test_divergences_against_scipy(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(40, generator=generator, dtype=torch.float64) * scale for _ in range(2))
    found = agreement(one, other)
    p, q = torch.softmax(one, -1).numpy(), torch.softmax(other, -1).numpy()
    assert found.kl == pytest.approx(float(rel_entr(q, p).sum()), rel=1e-6, abs=1e-12)
    middle = (p + q) / 2
    expected = float((rel_entr(p, middle) + rel_entr(q, middle)).sum() / 2)
    assert found.js == pytest.approx(expected, rel=1e-6, abs=1e-12)
    same = agreement(one, one)
    assert (same.kl, same.total_variation, same.top_overlap, same.same_argmax) == (0.0, 0.0, 1.0, True)


def test_a_chunk_of_another_model_is_refused() -> None:
    subject = tiny("qwen3")
    chunk = replace(precompile(subject, IDS[5:14], "none"), model_sha256="f" * 64)
    with pytest.raises(UnsupportedError, match="other weights, configuration or dtype"):
        compose(subject, composition_of(PROMPT, {"policy": chunk}))


def test_what_is_wrong_is_said_in_one_sentence() -> None:
    subject = tiny("qwen3")
    chunk = precompile(subject, IDS[5:14], "none")
    whole = composition_of(PROMPT, {"policy": chunk})
    with pytest.raises(ConfigError, match="names other tokens than its chunk"):
        Part("policy", (1, 2, 3), chunk)
    with pytest.raises(ConfigError, match="'splice' does not take seam=-1"):
        compose(subject, whole, "splice", seam=-1)
    with pytest.raises(ConfigError, match="has its parameters already"):
        compose(subject, whole, make_scheme("splice"), seam=3)
    with pytest.raises(ConfigError, match=r"55\.9 is no token id"):
        precompile(subject, [55.9], "none")  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="'b' is empty"):
        Composition((Part("a", (1,)), Part("b", ()), Part("c", (2,))))
    composed = compose(subject, whole)
    with pytest.raises(ConfigError, match="overlap"):
        as_cached_prompt(composed, {**composed.spans, "field": Span(6, 8)})
