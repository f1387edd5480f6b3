"""Tiny random models that read the organisms' words, and plain Hugging Face runs to check probes against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tiny_models import CONFIGS, build
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvprobe.models.subject import Subject
from kvprobe.organisms.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


@cache
def worded(family: str, dtype: torch.dtype = torch.float64) -> Subject:
    """A tiny random model with the organisms' tokenizer."""
    config = deepcopy(CONFIGS[family])
    config.vocab_size = len(TOKENIZER)
    config.eos_token_id = TOKENIZER.eos_token_id
    return replace(build(config, family, dtype), tokenizer=TOKENIZER)


def plain_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits `[vocab]` behind a prompt, by Hugging Face alone."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].double()


def plain_patched_logits(
    model: Any, base: Sequence[int], donor: Sequence[int], positions: Sequence[int], after: Sequence[int]
) -> Tensor:
    """Logits behind `after`, run on the base's cache with the donor's entries at `positions`, by Hugging Face alone.

    `base` and `donor` are the tokens that stand in the cache. Only for models without sliding windows.
    """
    caches: Mapping[str, Any] = {name: DynamicCache() for name in ("base", "donor")}
    with torch.no_grad():
        for name, ids in (("base", base), ("donor", donor)):
            model(torch.tensor([ids]), past_key_values=caches[name], use_cache=True)
        for ours, theirs in zip(caches["base"].layers, caches["donor"].layers, strict=True):
            ours.keys[:, :, positions] = theirs.keys[:, :, positions]
            ours.values[:, :, positions] = theirs.values[:, :, positions]
        places = torch.arange(len(base), len(base) + len(after))[None]
        output = model(torch.tensor([after]), past_key_values=caches["base"], position_ids=places, use_cache=True)
    return output.logits[0, -1].double()
