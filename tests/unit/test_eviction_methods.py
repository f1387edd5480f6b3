"""Eviction methods against plain Hugging Face: what is kept, and what a cache without the rest decides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache
from worded_models import gated, plain_logits, worded

from kvprobe.engine.forward import prefill
from kvprobe.engine.sweep import run_patches
from kvprobe.errors import ConfigError
from kvprobe.eviction.base import EVICTION_METHODS, Observed, evicted, kept_entries, make_eviction
from kvprobe.tasks.encoding import is_delimiter

NAMES = ("streaming_llm", "h2o", "scissorhands", "snapkv", "delimiters", "random")
EXACT = 1e-5


def observed(seed: int = 0, family: str = "qwen3") -> tuple[Observed, tuple[int, ...]]:
    ids = gated(1, seed=seed)[0].base.token_ids
    return Observed(worded(family), ids[:-1]), ids


def attention_of(seen: Observed) -> torch.Tensor:
    """`[layer, head, query, key]`, by Hugging Face alone."""
    model = worded("qwen3").model
    kernel = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            layers = model(torch.tensor([seen.token_ids]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(kernel)
    return torch.stack([layer[0] for layer in layers]).double()


def test_every_method_is_tested() -> None:
    assert set(NAMES) == set(EVICTION_METHODS.names())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(budget=st.floats(0.01, 1.0), seed=st.integers(0, 3))
def test_a_budget_is_kept_in_every_layer(name: str, budget: float, seed: int) -> None:
    seen, _ = observed(seed)
    kept = kept_entries(make_eviction(name), seen, budget)
    assert kept.shape == (seen.subject.layers, len(seen))
    assert (kept.sum(1) == max(1, math.ceil(budget * len(seen)))).all()
    assert torch.equal(kept, kept_entries(make_eviction(name), seen, budget))


@pytest.mark.parametrize("name", NAMES)
def test_eviction_decides_as_a_cache_without_the_entries(name: str) -> None:
    """By Hugging Face alone: each layer's evicted entries are taken out of its cache."""
    seen, ids = observed()
    kept = kept_entries(make_eviction(name), seen, 0.4)
    cache = prefill(seen.subject, ids).cache
    (found,) = run_patches(seen.subject, ids, cache, [evicted(kept, [len(ids) - 1])])
    model, past = seen.subject.model, DynamicCache()
    with torch.no_grad():
        model(torch.tensor([seen.token_ids]), past_key_values=past, use_cache=True)
        for layer, here in zip(past.layers, kept, strict=True):
            layer.keys, layer.values = layer.keys[:, :, here], layer.values[:, :, here]
        last = torch.tensor([ids[-1:]]), torch.tensor([[len(ids) - 1]])
        ought = model(last[0], past_key_values=past, position_ids=last[1]).logits[0, -1].double()
    torch.testing.assert_close(found.double(), ought, atol=EXACT, rtol=0)
    assert (found.double() - plain_logits(model, ids)).abs().max() > 10 * EXACT


def test_methods_keep_what_their_papers_say() -> None:
    seen, _ = observed(1)
    count, budget = math.ceil(0.4 * len(seen)), 0.4
    heads = attention_of(seen).sum(1)
    kept = {name: kept_entries(make_eviction(name), seen, budget) for name in NAMES}
    for layer in range(seen.subject.layers):
        sets = {name: set(rows[layer].nonzero()[:, 0].tolist()) for name, rows in kept.items()}
        assert sets["streaming_llm"] == {*range(4), *range(len(seen) - count + 4, len(seen))}
        recent = set(range(len(seen) - count // 2, len(seen)))
        heavy = heads[layer].sum(0)
        others = sorted(set(range(len(seen))) - recent, key=lambda place: -float(heavy[place]))
        assert sets["h2o"] == recent | set(others[: count - len(recent)])
        window = set(range(len(seen) - 16, len(seen)))
        votes = heads[layer, -16:].sum(0)
        pooled = [float(votes[max(0, place - 2) : place + 3].max()) for place in range(len(seen))]
        least = min(pooled[place] for place in sets["snapkv"] - window)
        assert window <= sets["snapkv"]
        assert all(pooled[place] <= least + 1e-9 for place in set(range(len(seen))) - sets["snapkv"])
        marks = {n for n, token in enumerate(seen.token_ids) if is_delimiter(token, seen.subject.tokenizer)}
        assert sets["delimiters"] >= marks or sets["delimiters"] <= marks
        assert {*range(len(seen) - 10, len(seen))} <= sets["scissorhands"]
        often = [
            sum(float(row[place]) > float(row.sum()) / (query + 1) for query, row in enumerate(heads[layer]))
            for place in range(len(seen))
        ]
        least_often = min(often[place] for place in sets["scissorhands"] - set(range(len(seen) - 10, len(seen))))
        if len(seen) <= 32:
            assert all(often[place] <= least_often for place in set(range(len(seen))) - sets["scissorhands"])


def test_everything_kept_changes_nothing_and_no_budget_is_refused() -> None:
    seen, ids = observed()
    cache = prefill(seen.subject, ids).cache
    whole = kept_entries(make_eviction("snapkv"), seen, 1.0)
    (found,) = run_patches(seen.subject, ids, cache, [evicted(whole, [len(ids) - 1])])
    torch.testing.assert_close(found.double(), plain_logits(seen.subject.model, ids), atol=EXACT, rtol=0)
    for budget in (0.0, -1.0, 1.5):
        with pytest.raises(ConfigError, match="share of entries that stay"):
            kept_entries(make_eviction("random"), seen, budget)
    with pytest.raises(ValueError, match="odd"):
        make_eviction("snapkv", kernel_size=4)
