"""Counted FLOPs are those torch counts, on every architecture: active experts, expanded latents, visible keys."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, FAMILIES, WINDOW, tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from kvprobe.engine.first_layers import entries_at_layer
from kvprobe.engine.forward import forward, prefill

# A single query sees every key of so short a text, so torch multiplies no masked score.
CACHED = WINDOW - 2


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cached", [0, CACHED])
def test_receipts_of_one_token_count_what_torch_counts(name: str, cached: int) -> None:
    # Only the loop over experts, which a float64 model uses, has products that torch counts.
    subject = tiny(name, torch.float64, "eager")
    past = prefill(subject, tokens(cached)).cache if cached else None
    with FlopCounterMode(display=False) as counter:
        step = forward(subject, [7], past)
    assert counter.get_total_flops() == step.receipt.flops


@pytest.mark.parametrize("name", [name for name in FAMILIES if CONFIGS[name].model_type.startswith("deepseek")])
def test_expanding_cached_latents_is_counted_in_the_first_layers_too(name: str) -> None:
    subject = tiny(name, torch.float64, "eager")
    past = prefill(subject, tokens(CACHED)).cache
    _, all_layers = entries_at_layer(subject, [7], past, subject.layers - 1)
    logits = subject.architecture.flops_per_logits(subject.config)
    assert all_layers.flops == forward(subject, [7], past).receipt.flops - logits


def test_tokens_run_the_chosen_experts_alone() -> None:
    """All experts together would cost several times as much."""
    for name in ("qwen3_moe", "mixtral", "deepseek_v3"):
        subject = tiny(name)
        config = subject.config
        experts = sum(p.numel() for n, p in subject.model.named_parameters() if ".experts." in n)
        others = subject.architecture.mlp_flops_per_token(config) - 2 * experts * config.num_experts_per_tok // (
            getattr(config, "n_routed_experts", None) or config.num_experts
        )
        rest = sum(
            p.numel()
            for n, p in subject.model.named_parameters()
            if ".mlp." in n and ".experts." not in n and p.ndim == 2
        )
        assert others == 2 * rest
