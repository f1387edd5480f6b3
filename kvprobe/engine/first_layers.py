"""Running the first layers of a model alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.forward import call_model, clock
from kvprobe.engine.masks import MaskPlan, plan_masks
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import UnsupportedError
from kvprobe.models.caching import empty_cache
from kvprobe.models.subject import Subject

DEVIATION_LAYER = 1
"""The first layer whose entries depend on other tokens."""


class _EnoughError(Exception):
    """Raised inside a forward pass when the wanted layers have run."""


def entries_at_layer(
    subject: Subject, token_ids: Sequence[int], cache: KVCache | None, layer: int
) -> tuple[LayerKV, Receipt]:
    """Keys and values of `layer` for tokens that come after `cache`; the layers behind it are not run.

    Args:
        subject: the model.
        token_ids: at least one token, at the positions that follow the cache.
        cache: what comes before them; None for nothing.
        layer: number of the layer whose entries are wanted.

    Returns:
        `[1, kv_head, token, head_dim]` each, and a receipt that counts each token by the share of layers it ran
        through, rounded down.

    Raises:
        UnsupportedError: there is no such layer, or no token.
    """
    if not 0 <= layer < subject.layers or not len(token_ids):
        raise UnsupportedError(f"There is no layer {layer} of {subject.layers} to run, or no token to run it on.")
    past = cache if cache is not None and len(cache) else None
    start = 0 if past is None else len(past)
    before = torch.empty(0, dtype=torch.long) if past is None else past.positions
    places = torch.arange(len(token_ids)) + (0 if past is None else int(before[-1]) + 1)
    keys = torch.cat([before, places])
    plan = plan_masks(subject, places, keys, torch.ones(len(places), len(keys), dtype=torch.bool).tril(start))
    filled = empty_cache() if past is None else past.to_hugging_face()
    started = clock(subject)
    with _stopping_after(subject, layer):
        axes = None if past is None else past.text_axes(places)
        call_model(subject, torch.as_tensor(token_ids, dtype=torch.long)[None], places, filled, plan, axes=axes)
    seconds = clock(subject) - started
    held = filled.layers[layer]
    entries = LayerKV.computed(held.keys[:, :, start:], held.values[:, :, start:])
    run = len(token_ids) * (layer + 1) // subject.layers
    flops = _flops(subject, len(token_ids), len(keys), plan, layer + 1)
    return entries, Receipt(tokens_reused=start, tokens_recomputed=run, flops=flops, seconds=seconds)


def deviation(new: LayerKV, old: LayerKV) -> torch.Tensor:
    """`[position]`: norm of the change of keys plus norm of the change of values, over heads and channels."""
    keys = (new.keys.float() - old.keys.float()).square().sum((0, 1, 3)).sqrt()
    return keys + (new.values.float() - old.values.float()).square().sum((0, 1, 3)).sqrt()


@contextmanager
def _stopping_after(subject: Subject, layer: int) -> Iterator[None]:
    """Inside the block, a forward pass ends when `layer` has run."""

    def stop(*_: Any) -> None:
        raise _EnoughError

    layers = subject.architecture.decoder_layers(subject.model)
    handle = layers[layer + 1].register_forward_pre_hook(stop) if layer + 1 < len(layers) else None
    try:
        yield
    except _EnoughError:
        pass
    finally:
        if handle is not None:
            handle.remove()


def _flops(subject: Subject, tokens: int, keys: int, plan: MaskPlan, layers: int) -> int:
    adapter, config = subject.architecture, subject.config
    attended = sum(int(plan.by_type[kind].sum()) for kind in plan.layer_types[:layers])
    weights = tokens * adapter.flops_per_token(config) * layers // subject.layers
    expanded = keys * layers * adapter.flops_per_key(config)
    return weights + expanded + attended * adapter.flops_per_attended_key(config)
