"""Prompts that begin alike share one cache: nothing changes beyond rounding, and nothing is run twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, tiny, tokens

from kvprobe.engine.forward import prefill
from kvprobe.engine.prefills import kept_prefills, share_prefixes
from kvprobe.models.subject import Subject


def sharing(name: str, *prefixes: list[int]) -> Subject:
    subject = replace(tiny(name, torch.float64), kept={})
    share_prefixes(subject, prefixes)
    return subject


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shared_beginning_changes_nothing_beyond_rounding(name: str) -> None:
    ids = tokens(17)
    subject = sharing(name, ids[:9], ids[:4])
    alone, shared = prefill(tiny(name, torch.float64), ids), prefill(subject, ids)
    torch.testing.assert_close(shared.logits, alone.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(shared.cache.positions, alone.cache.positions)
    for ours, theirs in zip(shared.cache.layers, alone.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=0)
    assert (shared.receipt.tokens_reused, shared.receipt.tokens_appended) == (9, 8)


def test_a_prompt_is_run_once_and_comes_back_bit_for_bit() -> None:
    ids = tokens(15)
    subject = sharing("llama", ids[:6])
    first = prefill(subject, ids)
    passes: list[int] = []
    hook = subject.model.register_forward_pre_hook(lambda *_: passes.append(1))
    again = prefill(subject, ids)
    hook.remove()
    assert not passes
    assert torch.equal(first.logits, again.logits)
    assert first.cache.fingerprint() == again.cache.fingerprint()
    assert again.receipt == first.receipt


def test_prompts_that_begin_otherwise_are_run_whole() -> None:
    ids = tokens(12)
    subject = sharing("llama", tokens(6, seed=5))
    assert prefill(subject, ids).receipt.tokens_appended == len(ids)
    kept = kept_prefills(subject)
    assert kept is not None
    assert not kept.prompts
    assert kept_prefills(replace(subject, kept={})) is None
