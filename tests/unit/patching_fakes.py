"""Random models that read the organisms' language, and a plain Hugging Face script to compare patched margins with."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import torch
from tiny_models import CONFIGS, build
from transformers import DynamicCache

from kvprobe.models.subject import Subject
from kvprobe.organisms.tokenizer import build_tokenizer
from kvprobe.tasks.base import Task
from kvprobe.tasks.pairs import Pair, align

TOKENIZER = build_tokenizer()


@cache
def reader_of_words(family: str = "qwen3", dtype: torch.dtype = torch.float32) -> Subject:
    """A tiny random model with the organisms' tokenizer."""
    config = deepcopy(CONFIGS[family])
    config.vocab_size = len(TOKENIZER)
    return replace(build(config, family, dtype), tokenizer=TOKENIZER)


def aligned(task: Task) -> list[Pair]:
    """The task's pairs as the organisms' tokenizer aligns them."""
    return [align(pair, TOKENIZER) for pair in task.prompt_pairs()]


def labelled(rows: Sequence[dict[str, Any]], pairs: Sequence[Pair]) -> pd.DataFrame:
    """A probe's rows with their skeletons."""
    table = pd.DataFrame(rows)
    return table.assign(skeleton=[pairs[pair].scenario.skeleton for pair in table["pair"]])


def plain_margin(
    model: Any, base: Sequence[int], donor: Sequence[int], positions: Sequence[int], answers: tuple[int, int]
) -> float:
    """Margin of `base` with the cache entries at `positions` from `donor`, by Hugging Face alone."""
    caches = []
    with torch.no_grad():
        for ids in (base, donor):
            past = DynamicCache()
            model(torch.tensor([list(ids[:-1])]), past_key_values=past, use_cache=True)
            caches.append(past)
        for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
            for place in positions:
                mine.keys[0, :, place] = other.keys[0, :, place]
                mine.values[0, :, place] = other.values[0, :, place]
        logits = model(torch.tensor([[base[-1]]]), past_key_values=caches[0], use_cache=True).logits[0, -1]
    return float(logits[answers[1]] - logits[answers[0]])


def answers_of(pair: Pair) -> tuple[int, int]:
    """Token ids of the base's and the donor's answer."""
    return pair.base_answer_id, pair.donor_answer_id
