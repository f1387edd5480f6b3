"""How many rows a pass takes at once, and the memory that work needs, worked out before it is done."""

from __future__ import annotations

import torch

from kvprobe.models.subject import Subject

# Of the tensors of one pass; larger batches gain nothing on a CPU, or lose by leaving its cache.
_CPU_BYTES = 256 * 2**20
_CPU_LAID_OUT_BYTES = 32 * 2**20
_MOST_ROWS = {"cpu": 256}
_MOST_ROWS_ELSEWHERE = 1024
# Logits as the model gives them, as they are checked, and what is made of them.
_LOGIT_COPIES = 3
# Hidden states alive at once in a decoder layer: two residuals, norm, query, output, MLP's three.
_HIDDEN_COPIES = 8
SCORES_AT_ONCE = 2**20
"""Attention scores that a shared-prefix pass holds at once, in elements."""


def plan_batch(subject: Subject, length: int, tokens: int = 1, *, laid_out: bool = False) -> int:
    """Rows of one pass that fit in memory with room to spare.

    Args:
        subject: the model.
        length: keys that each row attends to.
        tokens: run in each row.
        laid_out: every row has a whole cache of its own in the layer that attends, as on the reference path; so it is
            for architectures that cannot share one.
    """
    laid_out = laid_out or not subject.architecture.shares_prefix
    per_row = bytes_per_row(subject, length, tokens, laid_out=laid_out)
    budget = _CPU_LAID_OUT_BYTES if laid_out else _CPU_BYTES
    if subject.device.type == "cuda":
        budget = torch.cuda.mem_get_info(subject.device)[0] // 2
    most = _MOST_ROWS.get(subject.device.type, _MOST_ROWS_ELSEWHERE)
    return max(1, min(most, (budget - shared_bytes(subject)) // per_row if not laid_out else budget // per_row))


def bytes_per_row(subject: Subject, length: int, tokens: int = 1, *, laid_out: bool = False) -> int:
    """Bytes that one more row adds to a pass; arguments as in `plan_batch`.

    On a shared prefix a row's masks and its own entries grow with `length` by a few bytes a key, its keys and values
    not at all.
    """
    config, size = subject.config, subject.dtype.itemsize
    width, heads = subject.architecture.head_dim(config), config.num_attention_heads
    hidden = _HIDDEN_COPIES * max(config.hidden_size, heads * width) + 3 * config.intermediate_size
    activations = tokens * hidden * size + _LOGIT_COPIES * 4 * config.vocab_size
    if not laid_out:
        return int(activations + tokens * length * size)
    # One layer's keys and values as laid out and once more repeated for every query head, and scores.
    per_key = 2 * width * size * (config.num_key_value_heads + heads) + 4 * 4 * heads * tokens
    return int(activations + length * per_key)


def shared_bytes(subject: Subject) -> int:
    """Bytes that a shared-prefix pass takes whatever its rows: the scores of one part, as they become weights."""
    return int(4 * SCORES_AT_ONCE * max(4, subject.dtype.itemsize))


def cache_bytes(subject: Subject, length: int) -> int:
    """Bytes of a cache of `length` entries in all layers."""
    return length * subject.layers * subject.architecture.cached_numbers(subject.config) * subject.dtype.itemsize


def weight_bytes(subject: Subject) -> int:
    """Bytes of the weights, tied ones counted once."""
    tensors = {tensor.data_ptr(): tensor for tensor in subject.model.parameters()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def peak_bytes(subject: Subject, length: int, caches: int = 3) -> int:
    """Bytes that a sweep over a prompt of `length` tokens needs at its peak, the process itself left out.

    Args:
        subject: the model.
        length: tokens of the prompt.
        caches: kept at once: base, donor, and the one that is made.
    """
    rows = plan_batch(subject, length)
    sweep = rows * bytes_per_row(subject, length) + shared_bytes(subject)
    # A prefill attends from every token to every one before it, and keeps the hidden states of all.
    prefill = bytes_per_row(subject, length, length) + 4 * subject.config.num_attention_heads * length * length
    return weight_bytes(subject) + caches * cache_bytes(subject, length) + max(sweep, prefill)
