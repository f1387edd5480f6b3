"""Tiny random models that read the organisms' words, and plain Hugging Face runs to check probes against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import torch
from tiny_models import CONFIGS, build
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvprobe.models.subject import Subject
from kvprobe.probes.base import Probe
from kvprobe.stats import Effect, Sample, StatisticsConfig
from kvprobe.tasks.base import Task
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.extra_lines import Subjects, line_tokens
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, align
from kvprobe.tasks.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


@cache
def worded(family: str = "qwen3", dtype: torch.dtype = torch.float64) -> Subject:
    """A tiny random model with the organisms' tokenizer."""
    config = deepcopy(CONFIGS[family])
    config.get_text_config().vocab_size = len(TOKENIZER)
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if hasattr(config, name):
            # No word stands for an image.
            setattr(config, name, -1)
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


def aligned(task: Task) -> list[Pair]:
    """The task's pairs as the organisms' tokenizer aligns them."""
    return [align(pair, TOKENIZER) for pair in task.prompt_pairs()]


def gated(size: int = 1, **parameters: Any) -> list[Pair]:
    """Pairs of the gated decision."""
    return aligned(GatedDecision(size=size, **parameters))


def labelled(rows: Sequence[dict[str, Any]], pairs: Sequence[Pair]) -> pd.DataFrame:
    """A probe's rows with their skeletons."""
    table = pd.DataFrame(rows)
    return table.assign(skeleton=[pairs[pair].scenario.skeleton for pair in table["pair"]])


def measured(probe: Probe, subject: Subject, pairs: Sequence[Pair]) -> pd.DataFrame:
    """What a probe measures, with skeletons."""
    return labelled(probe.measure(subject, pairs, lambda done, total: None), pairs)


def effects_of(probe: Probe, rows: pd.DataFrame, **statistics: Any) -> dict[str, Effect]:
    """The effects that a probe's reading makes of rows, by name, with the fewest resamples that are allowed."""
    sample = Sample.of_model(rows, StatisticsConfig(**{"resamples": 999, **statistics}))
    return {effect.name: effect for effect in probe.read_by().read(probe, sample)}


def margin_of(pair: Pair, logits: Tensor) -> float:
    """The donor's answer less the base's, in logits `[vocab]`."""
    return float(logits[pair.donor_answer_id] - logits[pair.base_answer_id])


def margin_behind(subject: Subject, pair: Pair, ids: Sequence[int]) -> float:
    """Margin behind any prompt, by Hugging Face alone."""
    return margin_of(pair, plain_logits(subject.model, ids))


def with_line(pair: Pair, name: str, *, donor: bool = False) -> list[int]:
    """Tokens of a prompt of the pair with an extra line before the task, written without the probes."""
    attributes = pair.scenario.attributes
    said = Subjects(pair.scenario.wording, *(attributes[key] for key in ("entity", "field", "old", "new")))
    ids, at = (pair.donor if donor else pair.base).token_ids, pair.base.spans["task"].start
    return [*ids[:at], *line_tokens(name, said, TOKENIZER), *ids[at:]]


def plain_margin(
    subject: Subject, pair: Pair, positions: Sequence[int], donor: TokenizedContext | None = None
) -> float:
    """Margin of the base prompt with the cache entries at `positions` from the donor, by Hugging Face alone.

    `donor` is another prompt to take the entries from. Only for models without sliding windows.
    """
    base, source = pair.base.token_ids, (donor or pair.donor).token_ids
    return margin_of(pair, plain_patched_logits(subject.model, base[:-1], source[:-1], list(positions), base[-1:]))


def answers_of(pair: Pair) -> tuple[int, int]:
    """Token ids of the base's and the donor's answer."""
    return pair.base_answer_id, pair.donor_answer_id
