"""Contextual calibration (Zhao et al. 2021): a model's preference for an answer that no content gives it, taken off.

The bias is measured on content-free prompts, those of the pairs with `N/A` in place of the field's value, as an offset
of each answer's logit. Decisions change with it, and by one constant for each pair; differences of margins, and so
recoveries, do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvprobe.engine.forward import prefill
from kvprobe.engine.prefills import kept_apart
from kvprobe.engine.readout import read
from kvprobe.models.subject import Subject
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.pairs import Pair

CONTENT_FREE = " N/A"
Offsets = Mapping[int, float]
"""By token id of an answer, in logits."""


def answer_offsets(subject: Subject, pairs: Sequence[Pair]) -> dict[int, float]:
    """The bias towards each answer of the pairs: the least-squares fit of the margins of content-free prompts.

    Offsets of the two answers of a pair differ by what the model prefers one of them, in logits; a word that answers
    several skeletons has one offset.
    """
    neutral = encode_segment(CONTENT_FREE, subject.tokenizer)
    tokens = sorted({token for pair in pairs for token in (pair.base_answer_id, pair.donor_answer_id)})
    equations, margins = np.zeros((len(pairs), len(tokens))), np.zeros(len(pairs))
    for row, pair in enumerate(pairs):
        ids = pair.base.token_ids
        prompt = (*ids[: pair.field.start], *neutral, *ids[pair.field.end :])
        margins[row] = read(prefill(subject, prompt).logits, pair.base_answer_id, pair.donor_answer_id).margin
        equations[row, tokens.index(pair.donor_answer_id)] = 1
        equations[row, tokens.index(pair.base_answer_id)] = -1
    found = np.linalg.lstsq(equations, margins, rcond=None)[0]
    return {token: round(float(value), 6) for token, value in zip(tokens, found, strict=True)}


@contextmanager
def calibrated(subject: Subject, offsets: Offsets) -> Iterator[None]:
    """Have the model's logits of the answers less their offsets, until the context ends."""
    if not offsets:
        yield
        return
    ids = torch.tensor(list(offsets), device=subject.device)
    bias = torch.tensor(list(offsets.values()), device=subject.device)

    def subtract(_: Any, __: Any, output: Any) -> Any:
        logits = output.logits.clone()
        logits[..., ids] -= bias.to(logits.dtype)
        output.logits = logits
        return output

    # Of the whole model, behind what caps its logits.
    hook = subject.model.register_forward_hook(subtract)
    try:
        with kept_apart(subject, tuple(sorted(offsets.items()))):
            yield
    finally:
        hook.remove()


def told(offsets: Offsets, pairs: Sequence[Pair]) -> str:
    """How large the bias is between the answers of the pairs, in one sentence; empty without calibration."""
    if not offsets:
        return ""
    biases = [abs(offsets[pair.donor_answer_id] - offsets[pair.base_answer_id]) for pair in pairs]
    mean, most = sum(biases) / len(biases), max(biases)
    return (
        f"Answers are calibrated on content-free prompts: a bias of {mean:.2f} logits on average, {most:.2f} at most."
    )
