"""The missing-sink diagnosis against plain Hugging Face, and on a cache whose first token is made to be a sink."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny, tokens
from transformers.cache_utils import DynamicCache

from kvprobe.composing.base import make_scheme
from kvprobe.composing.prompts import compile_segment, composition_of
from kvprobe.composing.sinks import read_sink
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import prefill
from kvprobe.errors import ConfigError
from kvprobe.models.subject import Subject
from kvprobe.tasks.context import Span, TokenizedContext

IDS = tokens(24)
SPANS = {"system": Span(0, 6), "chunk": Span(6, 14), "task": Span(14, 24)}
PROMPT = TokenizedContext(tuple(IDS), SPANS, "")


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "mistral"])
def test_attention_and_norms_are_those_of_hugging_face(family: str) -> None:
    subject = tiny(family, torch.float64, "eager")
    past = DynamicCache()
    with torch.no_grad():
        output = subject.model(torch.tensor([IDS]), past_key_values=past, output_attentions=True)
    found = read_sink(subject, IDS, prefill(subject, IDS).cache, SPANS["chunk"])
    for layer, weights in enumerate(output.attentions):
        assert found.attention[layer] == pytest.approx(float(weights[0, :, 14:, 6].mean()), abs=1e-6)
        assert found.attention_elsewhere[layer] == pytest.approx(float(weights[0, :, 14:, 7:14].mean()), abs=1e-6)
        assert found.attention_on_start[layer] == pytest.approx(float(weights[0, :, 14:, 0].mean()), abs=1e-6)
        norms = past.layers[layer].keys[0, :, 6:14].pow(2).sum((0, 2)).sqrt()
        assert found.key_norm[layer] == pytest.approx(float(norms[0] / norms.median()), rel=1e-5)


def test_a_made_sink_is_seen_and_goes_with_the_seam() -> None:
    subject = tiny("qwen3", torch.float64)
    chunk = compile_segment(subject, PROMPT, "chunk", "none")
    layers = tuple(
        replace(layer, keys=scaled, source_keys=scaled, values=first_scaled(layer.values, 0.1))
        for layer in chunk.cache.layers
        for scaled in [first_scaled(layer.keys, 5.0)]
    )
    sink = replace(chunk, cache=KVCache(layers, chunk.cache.positions, chunk.cache.source_positions))

    def reading(seam: int) -> tuple[float, float]:
        composed = make_scheme("splice", seam=seam).compose(subject, composition_of(PROMPT, {"chunk": sink}))
        found = read_sink(subject, IDS, composed.cache, SPANS["chunk"])
        return found.key_norm[1], found.value_norm[1]

    usual = read_sink(subject, IDS, prefill(subject, IDS).cache, SPANS["chunk"])
    assert reading(0)[0] > 3 * usual.key_norm[1]
    assert reading(0)[1] < 0.4 * usual.value_norm[1]
    assert reading(1)[0] == pytest.approx(usual.key_norm[1], rel=0.3)


def test_a_chunk_of_one_token_and_one_at_the_end_are_refused() -> None:
    subject: Subject = tiny("qwen3", torch.float64)
    cache = prefill(subject, IDS).cache
    for span in (Span(6, 7), Span(20, 24)):
        with pytest.raises(ConfigError, match="one behind"):
            read_sink(subject, IDS, cache, span)


def first_scaled(entries: torch.Tensor, factor: float) -> torch.Tensor:
    scaled = entries.clone()
    scaled[:, :, 0] *= factor
    return scaled
