"""A model that writes tool calls by rule, and reads what it does from nothing but the cache that it is given.

Its keys and values are those of a tiny random model. Values of the first layer say which tokens the cache holds, for they
depend on the token alone. If the definition of the right tool is among them, it names that tool, else it declines. It has
the arguments right only if all cached values of the last layer are those of one plain prefill of these very tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from tiny_models import CONFIGS, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvprobe.models.subject import Subject
from kvprobe.tasks.pairs import PromptPair
from kvprobe.tasks.tool_calls import tools

DECLINED = " I cannot do that."
_TOLERANCE = 1e-6


def trained_tokenizer(pairs: Sequence[PromptPair]) -> PreTrainedTokenizerFast:
    """Byte-level, so that it can write any text, with the pairs' words as tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, min_frequency=1, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    texts = [context.text for pair in pairs for context in (pair.base, pair.donor)]
    calls = [pair.scenario.attributes[key] for pair in pairs for key in ("base_call", "donor_call")]
    core.train_from_iterator([*texts, *calls], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def exacting_caller(pairs: Sequence[PromptPair]) -> Subject:
    """A subject that serves the requests of the pairs."""
    tokenizer = trained_tokenizer(pairs)
    shape = CONFIGS["qwen3"].to_dict()
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = LlamaConfig(
        **{key: shape[key] for key in (*kept, "intermediate_size", "initializer_range")},
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
    )
    subject = build(config, "exacting-caller", torch.float64)
    requests = {
        _request(context.text): pair.scenario.attributes[key]
        for pair in pairs
        for context, key in ((pair.base, "base_call"), (pair.donor, "donor_call"))
    }
    return replace(subject, tokenizer=tokenizer, model=ExactingCaller(subject.model, tokenizer, requests))


class ExactingCaller:
    """See the module; it looks and is called like a Hugging Face model."""

    def __init__(self, inner: Any, tokenizer: Any, requests: Mapping[str, str]) -> None:
        self.inner = inner
        self.tokenizer = tokenizer
        self.requests = requests
        self.script: list[int] = []
        first = inner.model.layers[0]
        with torch.no_grad():
            self.table = first.self_attn.v_proj(first.input_layernorm(inner.model.embed_tokens.weight))
        self.colon = tokenizer.encode(":")[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, **given: Any) -> Any:
        output = self.inner(**given)
        if int(given["input_ids"][0, -1]) == self.colon:
            self.script = self._decide(given["past_key_values"])
        logits = torch.zeros_like(output.logits)
        if self.script:
            logits[:, -1, self.script.pop(0)] = 1.0
        return SimpleNamespace(logits=logits)

    def _decide(self, cache: Any) -> list[int]:
        held = cache.layers[0].values[0].transpose(0, 1).flatten(1)
        ids = torch.cdist(held, self.table).argmin(1)
        text = self.tokenizer.decode(ids)
        right = self.requests.get(_request(text)) if text.endswith("Call:") else None
        if right is None:
            return []
        call = json.loads(right)
        known = {tool.name: tool for library in ("home", "travel") for tool in tools(library)}  # type: ignore[arg-type]
        if known[call["name"]].definition not in text:
            return self._tokens(DECLINED)
        with torch.no_grad():
            plain = self.inner(input_ids=ids[None], use_cache=True).past_key_values
        if float((plain.layers[-1].values - cache.layers[-1].values).abs().max()) > _TOLERANCE:
            call["arguments"] = {name: str(value) for name, value in call["arguments"].items()}
        return self._tokens(f" {json.dumps(call)}")

    def _tokens(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]


def _request(text: str) -> str:
    return text.rpartition("Request:")[2].partition("\n")[0]
