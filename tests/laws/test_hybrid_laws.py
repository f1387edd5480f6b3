"""A hybrid composed with moved attention keys and values, against the model library's own full prefill.

The library computes the delta rule and all norms in float32 in a float64 model too, so equality is up to that.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_hybrids import ATTEND, CONFIGS, FALCON, LAYERS, build_hybrid, tiny_hybrid
from tiny_models import tiny, tokens
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from transformers.cache_utils import DynamicCache

from kvprobe.composing import hybrid
from kvprobe.composing.hybrid import compile_chunk, compose, hybrid_subject
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.interventions import AttentionKnockout
from kvprobe.engine.operations import recompute, reposition
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.models.architectures.base import architecture_of
from kvprobe.models.architectures.hybrid import hybrid_of
from kvprobe.models.subject import Subject

NOISE = 5e-5
IDS = tokens(24)
BEFORE, CHUNK, AFTER = IDS[:9], IDS[9:19], IDS[19:]


def plain(subject: Subject, ids: list[int]) -> Any:
    with torch.no_grad():
        return subject.model(torch.tensor([ids]), past_key_values=DynamicCache(config=subject.config), use_cache=True)


def piecewise(subject: Subject, pieces: list[list[int]]) -> None:
    past = DynamicCache(config=subject.config)
    with torch.no_grad():
        for piece in pieces[:-1]:
            subject.model.model(torch.tensor([piece]), past_key_values=past, use_cache=True)
        subject.model(torch.tensor([pieces[-1]]), past_key_values=past, use_cache=True, logits_to_keep=1)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", LAYERS)
@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(1, 6)),
    offset=st.integers(0, 900),
    seed=st.integers(0, 50),
)
@settings(max_examples=5)
def test_behind_its_own_prefix_a_chunk_decides_as_a_full_prefill(
    name: str, sizes: tuple[int, int, int], offset: int, seed: int
) -> None:
    """Wherever it was compiled: only relative positions count, and its keys move back."""
    before, chunk, after = sizes
    subject, ids = tiny_hybrid(name), tokens(before + chunk + after, seed)
    head, middle, rest = ids[:before], ids[before : before + chunk], ids[before + chunk :]
    compiled = compile_chunk(subject, middle, before=head, offset=offset)
    composed = compose(subject, [*([head] if head else []), compiled, rest])
    full = plain(subject, ids)
    assert composed.token_ids == tuple(ids)
    assert apart(composed.logits, full.logits[0, -1]) < NOISE
    step = torch.tensor([[7]])
    with torch.no_grad():
        one, other = (
            subject.model(step, past_key_values=past).logits for past in (composed.past, full.past_key_values)
        )
    assert apart(one, other) < NOISE


def test_moved_keys_are_native_ones_where_the_input_of_attention_is_the_same() -> None:
    """In a first layer it is the embedding alone, whatever stands before; in a later one it is not."""
    subject = tiny_hybrid("attends_first")
    moved = compile_chunk(subject, CHUNK).moved_to(subject, len(BEFORE))
    native = plain(subject, IDS).past_key_values.layers
    span = slice(len(BEFORE), len(BEFORE) + len(CHUNK))
    assert apart(moved[0].keys, native[0].keys[:, :, span]) < NOISE
    assert apart(moved[0].values, native[0].values[:, :, span]) < NOISE
    assert apart(moved[0].source_keys, native[0].keys[:, :, span]) > 0.1
    assert apart(moved[2].keys, native[2].keys[:, :, span]) > 0.1


@pytest.mark.parametrize("name", LAYERS)
def test_a_chunk_compiled_alone_decides_otherwise(name: str) -> None:
    subject = tiny_hybrid(name)
    composed = compose(subject, [BEFORE, compile_chunk(subject, CHUNK), AFTER])
    assert apart(composed.logits, plain(subject, IDS).logits[0, -1]) > 100 * NOISE


def test_recurrent_layers_scan_the_chunk_with_the_true_state() -> None:
    """Up to the first attention layer nothing of the chunk enters, and states are those of a prefill."""
    subject = tiny_hybrid("scans_first")
    chunk = compile_chunk(subject, CHUNK)
    composed = compose(subject, [BEFORE, chunk, AFTER]).past.layers
    native = plain(subject, IDS).past_key_values.layers
    alone = plain(subject, [*CHUNK, *AFTER]).past_key_values.layers
    states = [layers[0].recurrent_states[0] for layers in (composed, native, alone)]
    assert apart(states[0], states[1]) < NOISE
    assert apart(states[0], states[2]) > 100 * NOISE
    assert apart(composed[0].conv_states[0], native[0].conv_states[0]) < NOISE
    assert apart(composed[2].recurrent_states[0], native[2].recurrent_states[0]) > 100 * NOISE


@pytest.mark.parametrize("name", LAYERS)
def test_attention_holds_the_moved_entries_themselves_and_leaves_them_as_they_were(name: str) -> None:
    subject = tiny_hybrid(name)
    chunk = compile_chunk(subject, CHUNK, before=tokens(4, 1))
    kept = deepcopy(dict(chunk.layers))
    composed = compose(subject, [BEFORE, chunk, AFTER])
    span = slice(len(BEFORE), len(BEFORE) + len(CHUNK))
    for number, layer in chunk.moved_to(subject, len(BEFORE)).items():
        assert torch.equal(composed.past.layers[number].keys[:, :, span], layer.keys)
        assert torch.equal(composed.past.layers[number].values[:, :, span], layer.values)
        assert torch.equal(kept[number].keys, chunk.layers[number].keys)
        assert torch.equal(kept[number].values, chunk.layers[number].values)
    assert compose(subject, [BEFORE, chunk, AFTER]).logits.equal(composed.logits)


def test_several_chunks_each_move_to_their_place() -> None:
    subject = tiny_hybrid("scans_first")
    first = compile_chunk(subject, IDS[:6])
    second = compile_chunk(subject, IDS[10:15], before=IDS[:10])
    composed = compose(subject, [first, IDS[6:10], second, IDS[15:]])
    assert apart(composed.logits, plain(subject, IDS).logits[0, -1]) < NOISE
    assert composed.receipt.tokens_moved == 11
    assert composed.receipt.flops_saved == composed.receipt.projection_flops


@pytest.mark.parametrize("name", LAYERS)
def test_what_torch_no_longer_multiplies_is_what_the_receipt_says(name: str) -> None:
    subject = tiny_hybrid(name)
    chunk = compile_chunk(subject, CHUNK)
    with FlopCounterMode(display=False) as pieces:
        piecewise(subject, [BEFORE, CHUNK, AFTER])
    with FlopCounterMode(display=False) as counter:
        receipt = compose(subject, [BEFORE, chunk, AFTER]).receipt
    assert pieces.get_total_flops() - counter.get_total_flops() == receipt.projection_flops > 0
    assert 0 < receipt.flops_saved < receipt.projection_flops
    assert receipt.share_saved < subject.architecture.largest_saving(subject.config)
    assert (receipt.tokens_run, receipt.tokens_moved) == (len(IDS), len(CHUNK))
    assert receipt.attention_layers == LAYERS[name].count(ATTEND)
    assert f"{receipt.recurrent_layers} recurrent ones scanned anew" in str(receipt)


@pytest.mark.parametrize("name", LAYERS)
def test_flops_of_weights_and_scores_are_those_torch_counts(name: str) -> None:
    """A single step writes the delta rule without products; of its convolution torch counts padding too."""
    subject = tiny_hybrid(name)
    past = plain(subject, IDS).past_key_values
    subject.model.set_attn_implementation("eager")
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            subject.model(torch.tensor([[7]]), past_key_values=past, use_cache=True)
    finally:
        subject.model.set_attn_implementation("sdpa")
    counts = counter.get_flop_counts()["Global"]
    counted = sum(flops for kind, flops in counts.items() if "conv" not in str(kind))
    adapter, config = subject.architecture, subject.config
    attended = (len(IDS) + 1) * LAYERS[name].count(ATTEND) * adapter.flops_per_attended_key(config)
    assert counted == adapter.flops_per_token(config) + attended + adapter.flops_per_logits(config)
    step = adapter.prefill_flops(config, len(IDS) + 1) - adapter.prefill_flops(config, len(IDS))
    assert step == adapter.flops_per_token(config) + adapter.recurrence_flops_per_token(config) + attended


def test_the_largest_saving_is_the_share_of_the_weights_a_token_meets() -> None:
    """Of the real shape, its four kinds of layers by themselves: all later ones repeat them."""
    config = Qwen3NextConfig(num_hidden_layers=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    met, left_out = 0, 0
    for name, weight in model.model.layers.named_parameters():
        if weight.ndim == 1 or "conv1d" in name:
            continue
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1
        met += int(weight.numel() * share)
        left_out += weight.numel() if "k_proj" in name or "v_proj" in name else 0
    adapter = hybrid_of(config)
    assert 2 * met == adapter.flops_per_token(config)
    assert left_out / met == adapter.largest_saving(config) == adapter.largest_saving(Qwen3NextConfig())


def test_an_exception_leaves_the_model_and_the_cache_as_they_were() -> None:
    subject = tiny_hybrid("scans_first")
    chunk = compile_chunk(subject, CHUNK)
    before = compose(subject, [BEFORE, chunk, AFTER])
    modules = dict(subject.model.named_modules())
    past, calls = plain(subject, BEFORE).past_key_values, []

    def fail(*_: Any) -> None:
        calls.append(subject.model.model.layers[1].self_attn.k_proj)
        raise RuntimeError("in the middle")

    handle = subject.model.model.layers[2].register_forward_hook(fail)
    try:
        with (
            pytest.raises(RuntimeError, match="in the middle"),
            hybrid.taken_from(subject, past, chunk.moved_to(subject, len(BEFORE))),
        ):
            subject.model(torch.tensor([CHUNK]), past_key_values=past)
    finally:
        handle.remove()
    assert calls[0] is not modules["model.layers.1.self_attn.k_proj"]
    after = dict(subject.model.named_modules())
    assert list(after) == list(modules)
    assert all(after[name] is module for name, module in modules.items())
    assert not any("update" in vars(layer) for layer in past.layers)
    assert compose(subject, [BEFORE, chunk, AFTER]).logits.equal(before.logits)


def test_every_other_operation_of_the_engine_is_refused_before_the_model_runs() -> None:
    subject = tiny_hybrid("scans_first")
    cache = prefill(tiny("qwen3"), IDS).cache
    handle = subject.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    said = "'qwen3_next' is refused: it mixes attention with recurrent layers.*kvprobe.composing.hybrid"
    try:
        for operation in (
            lambda: prefill(subject, IDS),
            lambda: forward(subject, IDS, knockouts=[AttentionKnockout((5,), (1,))]),
            lambda: reposition(subject, cache, 3),
            lambda: architecture_of(subject.config),
            lambda: subject.architecture.bridgeable(subject.model),
        ):
            with pytest.raises(UnsupportedError, match=said):
                operation()
    finally:
        handle.remove()
    with pytest.raises(UnsupportedError):
        recompute(subject, cache, IDS, [3])
    with pytest.raises(UnsupportedError, match="Only a filled DynamicCache of attention layers"):
        KVCache.from_hugging_face(plain(subject, IDS).past_key_values)


def test_other_models_and_other_chunks_are_refused() -> None:
    for kind in ("falcon_h1", "jamba", "zamba2", "mamba2"):
        with pytest.raises(UnsupportedError, match=f"'{kind}' is refused: it .* kvprobe composes qwen3_next alone"):
            hybrid_of(SimpleNamespace(model_type=kind))
    with pytest.raises(UnsupportedError, match="'falcon_h1' is refused"):
        hybrid_subject(SimpleNamespace(config=FALCON))
    with pytest.raises(UnsupportedError, match="'qwen3' is not a hybrid"):
        compile_chunk(tiny("qwen3"), CHUNK)
    subject, other = tiny_hybrid("scans_first"), tiny_hybrid("attends_first")
    with pytest.raises(UnsupportedError, match="was not compiled with attends_first"):
        compose(other, [BEFORE, compile_chunk(subject, CHUNK), AFTER])
    with pytest.raises(ConfigError, match="nothing to compile"):
        compile_chunk(subject, [])
    for parts in ([], [BEFORE, []], [BEFORE, compile_chunk(subject, CHUNK)]):
        with pytest.raises(ConfigError, match="the last one of token ids"):
            compose(subject, parts)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "No layer of changed attends"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}, "scaling 'dynamic'"),
    ],
)
def test_what_cannot_be_moved_is_refused(changed: dict[str, Any], said: str) -> None:
    config = CONFIGS["attends_first"].__class__(**{**CONFIGS["attends_first"].to_dict(), **changed})
    subject = build_hybrid(config, "changed")
    with pytest.raises(UnsupportedError, match=said):
        compose(subject, [BEFORE, compile_chunk(subject, CHUNK), AFTER])


def test_a_pass_beyond_the_length_from_which_frequencies_change_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    config = CONFIGS["attends_first"].__class__(**{**CONFIGS["attends_first"].to_dict(), "rope_parameters": rope})
    subject = build_hybrid(config, "dynamic")
    with pytest.raises(UnsupportedError, match="changes its frequencies beyond 256 tokens"):
        compile_chunk(subject, CHUNK, before=BEFORE, offset=250)
