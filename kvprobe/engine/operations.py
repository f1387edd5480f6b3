"""The algebra of caches: each operation returns a new cache and the receipt of its cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.forward import forward, run_tokens
from kvprobe.engine.interventions import KVPatch, check_patches, check_same_shape, layers_of
from kvprobe.engine.positions import Positions, as_positions
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import UnsupportedError
from kvprobe.models.images import ImageFeatures
from kvprobe.models.subject import Subject

Result = tuple[KVCache, Receipt]


def slice_cache(cache: KVCache, positions: Positions) -> Result:
    """The entries at `positions` (a span, a range, a list), in that order.

    Raises:
        UnsupportedError: a position is not in the cache, or twice.
    """
    started = time.perf_counter()
    index = cache.index_of(as_positions(positions))
    contiguous = len(index) and bool((index == torch.arange(int(index[0]), int(index[0]) + len(index))).all())
    part = cache.take(slice(int(index[0]), int(index[0]) + len(index)) if contiguous else index)
    return part, Receipt(tokens_reused=len(part), seconds=time.perf_counter() - started)


def concat(*caches: KVCache) -> Result:
    """The entries of all caches one after the other, positions unchanged.

    Raises:
        UnsupportedError: positions do not increase across the joints, or the caches come from different models.
    """
    started = time.perf_counter()
    if not caches:
        raise UnsupportedError("There is nothing to concatenate.")
    for other in caches[1:]:
        check_same_shape(caches[0], other)
    positions = torch.cat([cache.positions for cache in caches])
    wrong = (positions.diff() <= 0).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise UnsupportedError(
            f"Position {int(positions[first + 1])} would follow position {int(positions[first])}; reposition the later "
            "cache first."
        )
    whole = KVCache.join(caches)
    return whole, Receipt(tokens_reused=len(whole), seconds=time.perf_counter() - started)


def overwrite(
    cache: KVCache,
    positions: Positions,
    donor: KVCache,
    layers: Sequence[int] | None = None,
    *,
    no_op: bool = False,
) -> Result:
    """`cache` with the keys and values at `positions` in `layers` (None for all) taken from `donor`.

    Raises:
        UnsupportedError: a position is missing in either, a layer does not exist, or the caches do not fit.
        NoEffectError: it changes nothing and `no_op` is not declared.
    """
    started = time.perf_counter()
    places = as_positions(positions)
    patch = KVPatch(places, donor, None if layers is None else tuple(layers), no_op)
    check_same_shape(cache, donor)
    here, there = cache.index_of(places), donor.index_of(places)
    chosen = set(layers_of(patch, len(cache.layers)))
    sources = cache.source_positions.clone()
    sources[here] = donor.source_positions[there]
    axes, source_axes = _axes_overwritten(cache, here, donor, there)
    moved = not torch.equal(sources, cache.source_positions) or not torch.equal(
        cache.source_triples if source_axes is None else source_axes, cache.source_triples
    )
    if len(chosen) < len(cache.layers) and moved:
        raise UnsupportedError(
            "Only some layers would come from a donor whose keys were computed at other positions; take all layers."
        )
    check_patches(cache, [patch])
    patched = tuple(
        layer.put(here, other.take(there)) if number in chosen else layer
        for number, (layer, other) in enumerate(zip(cache.layers, donor.layers, strict=True))
    )
    receipt = Receipt(
        tokens_reused=len(cache) - len(places), tokens_copied=len(places), seconds=time.perf_counter() - started
    )
    return KVCache(patched, cache.positions, sources, axes, source_axes), receipt


def _axes_overwritten(
    cache: KVCache, here: Tensor, donor: KVCache, there: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Axes and source axes of `cache` with entries `here` taken from entries `there` of `donor`."""
    if cache.axes is None and donor.axes is None:
        return None, None
    axes, sources = cache.triples.clone(), cache.source_triples.clone()
    axes[:, here], sources[:, here] = donor.triples[:, there], donor.source_triples[:, there]
    if not torch.equal(axes, cache.triples):
        raise UnsupportedError("The donor's entries stand elsewhere on the axes of M-RoPE; reposition the donor first.")
    return axes, sources


def recompute(
    subject: Subject,
    cache: KVCache,
    token_ids: Sequence[int],
    positions: Positions,
    *,
    images: Sequence[ImageFeatures] = (),
) -> Result:
    """`cache` with the entries at `positions` computed anew by the model, the others left as they are.

    The chosen tokens see the cached entries before them and one another; entries after them are not updated.

    Args:
        subject: the model.
        cache: one row.
        token_ids: the token of every entry of `cache`, in its order.
        positions: a span or any set of positions.
        images: what stands for the image tokens among `positions`, in their order.

    Raises:
        UnsupportedError: tokens and cache differ in length, a position is not in the cache, or images do not fit.
    """
    if len(token_ids) != len(cache):
        raise UnsupportedError(f"There are {len(token_ids)} tokens for a cache of {len(cache)} entries.")
    index = cache.index_of(as_positions(positions)).sort().values
    if not len(index):
        raise UnsupportedError("There is no position to recompute.")
    others = torch.ones(len(cache), dtype=torch.bool)
    others[index] = False
    kept = others.nonzero()[:, 0]
    seen = kept[kept < index[-1]]
    order = torch.cat([seen, index])
    places = cache.positions[index]
    result = run_tokens(
        subject,
        [token_ids[i] for i in index.tolist()],
        places.tolist(),
        cache.take(seen),
        order[None, :] <= index[:, None],
        axes=None if cache.axes is None else cache.axes[:, index],
        images=images,
    )
    fresh = result.cache.take(slice(len(seen), None))
    sources = cache.source_positions.index_copy(0, index, places)
    layers: tuple[LayerKV, ...] = tuple(
        old.put(index, new) for old, new in zip(cache.layers, fresh.layers, strict=True)
    )
    receipt = Receipt(
        tokens_reused=len(kept),
        tokens_recomputed=result.receipt.tokens_appended,
        flops=result.receipt.flops,
        seconds=result.receipt.seconds,
    )
    source_axes = None
    if cache.axes is not None:
        source_axes = cache.source_triples.index_copy(1, index, cache.axes[:, index])
    return KVCache(layers, cache.positions, sources, cache.axes, source_axes), receipt


def append(
    subject: Subject, cache: KVCache | None, token_ids: Sequence[int], positions: Sequence[int] | None = None
) -> Result:
    """`cache` with the entries of `token_ids` after it; see `forward` when their logits are wanted too."""
    result = forward(subject, token_ids, cache, positions=positions)
    return result.cache, result.receipt


def reposition(subject: Subject, cache: KVCache, delta: int, axes_delta: int | None = None) -> Result:
    """`cache` moved by `delta` positions: keys rotated in float32 from their originals, values untouched.

    Repositioning by `a` and then by `b` is bit-equal to repositioning by `a + b`. Under M-RoPE all three axes move by
    `axes_delta`, `delta` unless told: after images, text and images stand at a smaller position than their place in
    the prompt.

    Raises:
        UnsupportedError: a position would be negative or is none that the model has, or the RoPE scaling does not
            allow it.
    """
    started = time.perf_counter()
    axes_delta = delta if axes_delta is None else axes_delta
    positions = cache.positions + delta
    axes = None if cache.axes is None and axes_delta == delta else cache.triples + axes_delta
    places = positions if axes is None else axes
    if places.numel() and int(places.min()) < 0:
        raise UnsupportedError(f"Moving by {delta} would put an entry at position {int(places.min())}.")
    subject.check_reach(places)
    tables = subject.architecture.rotary(subject.model)
    if len(tables) != len(cache.layers):
        raise UnsupportedError(f"The cache has {len(cache.layers)} layers and {subject.name} has {len(tables)}.")
    if not delta and not axes_delta:
        return cache, Receipt(tokens_reused=len(cache), seconds=time.perf_counter() - started)
    turn = positions - cache.source_positions if axes is None else axes - cache.source_triples
    still = not bool(turn.any())
    # Layers that share a table share its angles.
    rotations = {table: table.rotation(turn, cache.layers[0].source_keys) for table in {*tables} if not still}
    layers = []
    for layer, table in zip(cache.layers, tables, strict=True):
        keys = layer.source_keys if still else table.turned(layer.source_keys, rotations[table])
        layers.append(LayerKV(keys, layer.values, layer.source_keys))
    heads = cache.layers[0].keys.shape[1]
    receipt = Receipt(
        tokens_rotated=len(cache),
        flops=3 * heads * len(cache) * sum(table.rotary_dim for table in tables),
        seconds=time.perf_counter() - started,
    )
    source_axes = None if axes is None else cache.source_triples
    return KVCache(tuple(layers), positions, cache.source_positions, axes, source_axes), receipt


def splice(subject: Subject, cache: KVCache, chunk: KVCache, at: int) -> Result:
    """`chunk` put into `cache` at position `at`; whatever stood from `at` on moves back to make room.

    `chunk` may come from a prefill at any offset. Nothing is recomputed: entries keep what they knew. Under M-RoPE it
    begins on all axes where text at `at` would stand, and what follows moves back by what it takes of the axes.

    Raises:
        UnsupportedError: the chunk is empty or the RoPE scaling does not allow moving.
    """
    if not len(chunk):
        raise UnsupportedError("There is nothing to splice: the chunk is empty.")
    extent = int(chunk.positions[-1] - chunk.positions[0]) + 1
    before = cache.take((cache.positions < at).nonzero()[:, 0])
    after = cache.take((cache.positions >= at).nonzero()[:, 0])
    start, axes = torch.tensor([at]), chunk.triples
    room = int((start if (place := before.text_axes(start)) is None else place).max())
    moved, cost = reposition(subject, chunk, at - int(chunk.positions[0]), room - int(axes.min()))
    parts = [before, moved]
    if len(after):
        shifted, shift_cost = reposition(subject, after, extent, int(axes.max()) + 1 - int(axes.min()))
        parts.append(shifted)
        cost = cost + shift_cost
    whole, joining = concat(*parts)
    reused = Receipt(tokens_reused=len(whole) - cost.tokens_rotated, seconds=joining.seconds)
    return whole, Receipt(tokens_rotated=cost.tokens_rotated, flops=cost.flops, seconds=cost.seconds) + reused
