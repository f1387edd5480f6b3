"""One law for each column of the support matrix, against the model library's own forward pass without a cache.

A law is measured twice: with the architecture's adapter, and with one that takes the architecture for plain grouped
attention. What holds both times is `exact`, what needs the adapter is `adapter`, what is refused is `refused`. Where it is refused
of a hybrid, the law of what can still be reused there decides whether it is `partial`. A law of caches kept in few bits
is measured with two steps of rounding: an error that goes with the step is `rounded`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tiny_hybrids import LAYERS, tiny_hybrid
from tiny_models import CONFIGS, WINDOW, build, tiny, tokens
from transformers import LlamaConfig, PretrainedConfig, Qwen3NextConfig

from kvprobe.composing import hybrid
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.interventions import AttentionKnockout, KVPatch
from kvprobe.engine.operations import concat, overwrite, recompute, reposition, slice_cache, splice
from kvprobe.engine.quantised import Integers, quantise
from kvprobe.engine.sweep import run_patches
from kvprobe.errors import UnsupportedError
from kvprobe.models import support
from kvprobe.models.architectures.base import FULL, ArchitectureAdapter
from kvprobe.models.architectures.hybrid import PARTIAL, hybrid_of
from kvprobe.models.subject import Subject

LENGTH = 3 * WINDOW
FIELD = range(4, 6)
# Float32 roundings inside the float64 models of some libraries, and of their angles at the small offsets used here.
LIMIT = 1e-4
TEXTS = 6

_SMALL: dict[str, Any] = {
    **{key: getattr(CONFIGS["llama"], key) for key in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim")},
    **{key: getattr(CONFIGS["llama"], key) for key in ("num_attention_heads", "num_key_value_heads", "pad_token_id")},
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, tuple[PretrainedConfig, str]] = {
    "any, dynamic RoPE": (
        LlamaConfig(**_SMALL, rope_parameters=DYNAMIC),
        "its frequencies depend on the length of the sequence, so keys made at one length cannot be moved to another",
    ),
    "any, longrope": (
        LlamaConfig(**_SMALL, rope_parameters=LONG),
        "it changes its frequencies beyond a length, so keys made below it cannot be moved beyond",
    ),
}


def plain(subject: Subject, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return subject.model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def edited(ids: list[int]) -> list[int]:
    return [3 + (token + 4) % 50 if place in FIELD else token for place, token in enumerate(ids)]


Keep = Callable[[KVCache], KVCache]


def as_it_is(cache: KVCache) -> KVCache:
    return cache


def in_bytes(subject: Subject, levels: int) -> Keep:
    """Caches are put to rest in 8 bits and restored, with `levels` of the 127 steps on either side in use."""
    apart = 127 / levels

    def coarser(stored: Integers) -> Integers:
        codes = ((stored.codes / apart).round() * apart).round().to(torch.int8)
        return Integers(codes, stored.scale)

    def keep(cache: KVCache) -> KVCache:
        rest = quantise(cache)
        keys, values = (tuple(map(coarser, part)) for part in (rest.keys, rest.values))
        return replace(rest, keys=keys, values=values).restored(subject)

    return keep


def edit(subject: Subject, keep: Keep = as_it_is, seed: int = 0) -> float:
    """Everything from the changed field on taken from a donor is the donor's decision; taken from itself, nothing."""
    ids = tokens(LENGTH, seed)
    base, donor = keep(prefill(subject, ids).cache), keep(prefill(subject, edited(ids)).cache)
    assert overwrite(base, FIELD, base, no_op=True)[0].fingerprint() == base.fingerprint()
    patch = KVPatch(tuple(range(FIELD.start, LENGTH - 1)), donor)
    return _apart(run_patches(subject, ids, base, [patch])[0], plain(subject, edited(ids)))


def recomputation(subject: Subject, keep: Keep = as_it_is, seed: int = 0) -> float:
    """The field and all that follows it computed anew is a prefill of the edited text."""
    ids = tokens(LENGTH, seed)
    stale = keep(prefill(subject, ids[:-1]).cache)
    fresh, _ = recompute(subject, stale, edited(ids)[:-1], range(FIELD.start, LENGTH - 1))
    return _apart(forward(subject, ids[-1:], fresh).logits, plain(subject, edited(ids)))


def move_and_splice(subject: Subject, keep: Keep = as_it_is, seed: int = 0) -> float:
    """A chunk computed at another offset, moved to its place and put between what surrounds it."""
    ids, away, chunk = tokens(LENGTH, seed), 90, range(5, 5 + WINDOW + 2)
    there = keep(prefill(subject, ids[:-1], offset=away).cache)
    part, _ = slice_cache(there, range(away + chunk.start, away + chunk.stop))
    head, _ = reposition(subject, slice_cache(there, range(away, away + chunk.start))[0], -away)
    rest = slice_cache(there, range(away + chunk.stop, away + LENGTH - 1))[0]
    tail, _ = reposition(subject, rest, -away - len(chunk))
    whole, _ = splice(subject, concat(head, tail)[0], part, at=chunk.start)
    return _apart(forward(subject, ids[-1:], whole).logits, plain(subject, ids))


def knockout(subject: Subject, keep: Keep = as_it_is, seed: int = 0) -> float:
    """Hiding the first tokens from all later ones leaves the text without them: only relative positions count."""
    ids, hidden = tokens(LENGTH, seed), 3
    gone = AttentionKnockout(tuple(range(hidden, LENGTH - 1)), tuple(range(hidden)))
    # Where all layers slide, the last token does not see so far anyway.
    last = replace(gone, queries=(LENGTH - 1,), no_op=True)
    cache = keep(forward(subject, ids[:-1], knockouts=[gone]).cache)
    return _apart(forward(subject, ids[-1:], cache, knockouts=[last]).logits, plain(subject, ids[hidden:]))


LAWS: dict[str, Callable[..., float]] = dict(
    zip(support.OPERATIONS, (edit, recomputation, move_and_splice, knockout), strict=True)
)


def moved_in_attention_alone(subject: Subject) -> float:
    """A chunk computed at another offset behind its text: attention takes its keys and values, all else is run."""
    ids, chunk = tokens(LENGTH), range(5, 5 + WINDOW + 2)
    before, after = ids[: chunk.start], ids[chunk.stop :]
    part = hybrid.compile_chunk(subject, ids[chunk.start : chunk.stop], before=before, offset=90)
    whole = hybrid.compose(subject, [before, part, after])
    saved, most = whole.receipt.share_saved, hybrid_of(subject.config).largest_saving(subject.config)
    assert 0 < saved < most, f"composing {subject.name} saves {saved:.2%} of a prefill and {most:.2%} is the most"
    return _apart(whole.logits, plain(subject, ids))


PARTLY: dict[str, Callable[[Subject], float]] = {"move and splice": moved_in_attention_alone}


def saving(config: PretrainedConfig, model: str) -> str:
    """The reason of a partial row."""
    return (
        "attention layers take moved keys and values and every token is run through all layers again, recurrent ones "
        f"with their true state (kvprobe.composing.hybrid); saves {hybrid_of(config).largest_saving(config):.1%} of a "
        f"prefill's weight FLOPs at most ({model})"
    )


IN_BYTES = "any, 8-bit cache"
KEPT = ("qwen3", "llama_yarn", "gemma2", "mistral", "glm", "deepseek_v2")
"""Models of every layout of keys and values, for the caches kept in 8 bits."""

# The model library's defaults are the shape of this model.
REASONS: dict[str, str] = {
    **{name: reason for name, (_, reason) in SCALINGS.items()},
    IN_BYTES: "keys are restored within half a 127th of the largest of their channel, values of their token",
    "qwen3_next": saving(Qwen3NextConfig(), "Qwen3-Next-80B-A3B"),
}


def taken_for_plain(subject: Subject) -> Subject:
    """The subject with an adapter that knows no window, no pair layout, no latent and no axes."""
    own = type(subject.architecture)
    ignorant = type(
        "Ignorant",
        (own,),
        {
            "layer_types": lambda self, config: (FULL,) * subject.layers,
            "model_cache": ArchitectureAdapter.model_cache,
            "rotary": ArchitectureAdapter.rotary,
            "adjacent_pairs": False,
        },
    )
    return replace(subject, architecture=ignorant())


def status(subject: Subject, operation: str) -> support.Status:
    """Raises AssertionError where an operation is neither right nor refused."""
    law = LAWS[operation]
    try:
        error = law(subject)
    except UnsupportedError:
        return _partial_or_refused(subject, operation)
    assert error < LIMIT, f"{operation} of {subject.name} is off by {error:.2g}"
    try:
        without = law(taken_for_plain(subject))
    except Exception:
        # A model given another's masks or layout fails in ways of its own.
        return "adapter"
    return "exact" if without < LIMIT else "adapter"


def rounded(subject: Subject, operation: str) -> support.Status:
    """The status with caches kept in 8 bits; raises AssertionError where an error does not go with the rounding.

    With steps 16 times as wide an error of rounding is about 16 times as large, one of another origin is as large as it
    was; the line is drawn halfway on a scale of factors. Means over texts, as one rounding can be lucky.
    """
    fine, coarse = (
        mean(LAWS[operation](subject, in_bytes(subject, levels), seed) for seed in range(TEXTS))
        for levels in (127, 127 // 16)
    )
    if fine < LIMIT:
        return "exact"
    assert fine < coarse / 4, (
        f"{operation} of {subject.name} is off by {fine:.2g}, and by {coarse:.2g} with wider steps"
    )
    return "rounded"


def _partial_or_refused(subject: Subject, operation: str) -> support.Status:
    if operation not in PARTLY or subject.config.model_type not in PARTIAL:
        return "refused"
    error = PARTLY[operation](subject)
    assert error < LIMIT, f"{operation} of {subject.name} is off by {error:.2g}, the part of it that can be done"
    return "partial"


def rows() -> dict[str, list[Subject]]:
    """The tiny models that stand for each row of the matrix."""
    found: dict[str, list[Subject]] = {}
    for name in CONFIGS:
        found.setdefault(CONFIGS[name].model_type, []).append(tiny(name, torch.float64))
    for name in LAYERS:
        found.setdefault("qwen3_next", []).append(tiny_hybrid(name))
    for label, (config, _) in SCALINGS.items():
        found[label] = [build(config, label, torch.float64)]
    found[IN_BYTES] = [tiny(name, torch.float64) for name in KEPT]
    return found


def measured(row: str) -> list[support.Status]:
    """The weakest status of each operation over all models of a row."""
    order, law = list(support.MEANING), rounded if row == IN_BYTES else status
    return [max((law(subject, name) for subject in rows()[row]), key=order.index) for name in support.OPERATIONS]


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def write(path: Path) -> None:
    """Measure all rows and write the matrix that kvprobe ships."""
    matrix = {
        name: {"cells": measured(name), **({"reason": REASONS[name]} if name in REASONS else {})}
        for name in sorted(rows(), key=lambda row: (row.startswith("any,"), row))
    }
    path.write_text(json.dumps(matrix, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(support.__file__).with_name(support.MATRIX))
