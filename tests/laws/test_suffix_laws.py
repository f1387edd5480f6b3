"""Suffixes run together equal each suffix run alone after the prefix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, rounds_to_float32, tiny, tokens

from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.operations import concat, overwrite
from kvprobe.engine.suffixes import run_suffixes
from kvprobe.errors import NoEffectError, UnsupportedError

PREFIX = 9


@pytest.mark.parametrize("name", FAMILIES)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5), size=st.integers(1, 5))
def test_together_equals_alone(name: str, lengths: list[int], size: int) -> None:
    subject = tiny(name, torch.float64)
    exact = 1e-5 if rounds_to_float32(name) else 1e-11
    prefix, donor = (prefill(subject, tokens(PREFIX, seed=seed)).cache for seed in (0, 1))
    suffixes = [tokens(length, seed=10 + n) for n, length in enumerate(lengths)]
    patches = [[KVPatch((n % PREFIX,), donor, no_op=True)] if n % 2 else [] for n in range(len(suffixes))]
    together = run_suffixes(subject, prefix, suffixes, patches, batch_size=size)
    for suffix, row, mine in zip(suffixes, patches, together, strict=True):
        seen = overwrite(prefix, row[0].positions, donor, no_op=True)[0] if row else prefix
        alone = forward(subject, suffix, seen)
        torch.testing.assert_close(mine.logits, alone.logits, atol=exact, rtol=0)
        whole, _ = concat(seen, mine.cache)
        assert whole.positions.tolist() == alone.cache.positions.tolist()
        for a, b in zip(whole.layers, alone.cache.layers, strict=True):
            torch.testing.assert_close(a.keys, b.keys, atol=exact, rtol=0)
            torch.testing.assert_close(a.values, b.values, atol=exact, rtol=0)


def test_refusals() -> None:
    subject = tiny("qwen3")
    prefix = prefill(subject, tokens(PREFIX)).cache
    with pytest.raises(UnsupportedError, match="at least one token each"):
        run_suffixes(subject, prefix, [[5], []])
    with pytest.raises(UnsupportedError, match="1 sets of patches for 2 suffixes"):
        run_suffixes(subject, prefix, [[5], [6]], [[]])
    with pytest.raises(NoEffectError, match="changes nothing"):
        run_suffixes(subject, prefix, [[5]], [[KVPatch((3,), prefix)]])
    assert run_suffixes(subject, prefix, []) == []
