"""One law for each column of the support matrix, against the model library's own forward pass without a cache.

A law is measured twice: with the architecture's adapter, and with one that takes the architecture for plain grouped
attention. What holds both times is `exact`, what needs the adapter is `adapter`, what is refused is `refused`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import CONFIGS, FAMILIES, WINDOW, build, tiny, tokens
from transformers import LlamaConfig, PretrainedConfig

from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.interventions import AttentionKnockout, KVPatch
from kvprobe.engine.operations import concat, overwrite, recompute, reposition, slice_cache, splice
from kvprobe.engine.sweep import run_patches
from kvprobe.errors import UnsupportedError
from kvprobe.models import support
from kvprobe.models.architectures.base import FULL, ArchitectureAdapter
from kvprobe.models.subject import Subject

LENGTH = 3 * WINDOW
FIELD = range(4, 6)
# Float32 roundings inside the float64 models of some libraries, and of their angles at the small offsets used here.
LIMIT = 1e-4

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


def edit(subject: Subject) -> float:
    """Everything from the changed field on taken from a donor is the donor's decision; taken from itself, nothing."""
    ids = tokens(LENGTH)
    base, donor = prefill(subject, ids).cache, prefill(subject, edited(ids)).cache
    assert overwrite(base, FIELD, base)[0].fingerprint() == base.fingerprint()
    patch = KVPatch(tuple(range(FIELD.start, LENGTH - 1)), donor)
    return _apart(run_patches(subject, ids, base, [patch])[0], plain(subject, edited(ids)))


def recomputation(subject: Subject) -> float:
    """The field and all that follows it computed anew is a prefill of the edited text."""
    ids = tokens(LENGTH)
    stale = prefill(subject, ids[:-1]).cache
    fresh, _ = recompute(subject, stale, edited(ids)[:-1], range(FIELD.start, LENGTH - 1))
    return _apart(forward(subject, ids[-1:], fresh).logits, plain(subject, edited(ids)))


def move_and_splice(subject: Subject) -> float:
    """A chunk computed at another offset, moved to its place and put between what surrounds it."""
    ids, away, chunk = tokens(LENGTH), 90, range(5, 5 + WINDOW + 2)
    there = prefill(subject, ids[:-1], offset=away).cache
    part, _ = slice_cache(there, range(away + chunk.start, away + chunk.stop))
    head, _ = reposition(subject, slice_cache(there, range(away, away + chunk.start))[0], -away)
    rest = slice_cache(there, range(away + chunk.stop, away + LENGTH - 1))[0]
    tail, _ = reposition(subject, rest, -away - len(chunk))
    whole, _ = splice(subject, concat(head, tail)[0], part, at=chunk.start)
    return _apart(forward(subject, ids[-1:], whole).logits, plain(subject, ids))


def knockout(subject: Subject) -> float:
    """Hiding the first tokens from all later ones leaves the text without them: only relative positions count."""
    ids, hidden = tokens(LENGTH), 3
    gone = AttentionKnockout(tuple(range(hidden, LENGTH)), tuple(range(hidden)))
    return _apart(forward(subject, ids, knockouts=[gone]).logits, plain(subject, ids[hidden:]))


LAWS: dict[str, Callable[[Subject], float]] = dict(
    zip(support.OPERATIONS, (edit, recomputation, move_and_splice, knockout), strict=True)
)


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
        return "refused"
    assert error < LIMIT, f"{operation} of {subject.name} is off by {error:.2g}"
    try:
        without = law(taken_for_plain(subject))
    except Exception:
        # A model given another's masks or layout fails in ways of its own.
        return "adapter"
    return "exact" if without < LIMIT else "adapter"


def rows() -> dict[str, list[Subject]]:
    """The tiny models that stand for each row of the matrix."""
    found: dict[str, list[Subject]] = {}
    for name in FAMILIES:
        found.setdefault(CONFIGS[name].model_type, []).append(tiny(name, torch.float64))
    for label, (config, _) in SCALINGS.items():
        found[label] = [build(config, label, torch.float64)]
    return found


def measured(subjects: list[Subject]) -> list[support.Status]:
    """The weakest status of each operation over all models of a row."""
    order = list(support.MEANING)
    return [max((status(subject, name) for subject in subjects), key=order.index) for name in support.OPERATIONS]


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def write(path: Path) -> None:
    """Measure all rows and write the matrix that kvprobe ships."""
    matrix = {
        name: {"cells": measured(subjects), **({"reason": SCALINGS[name][1]} if name in SCALINGS else {})}
        for name, subjects in sorted(rows().items(), key=lambda row: (row[0] in SCALINGS, row[0]))
    }
    path.write_text(json.dumps(matrix, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(support.__file__).with_name(support.MATRIX))
