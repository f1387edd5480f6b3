"""Many suffixes of one cached prefix, run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import call_model, forward, logits_of
from kvprobe.engine.interventions import KVPatch, check_patches
from kvprobe.engine.masks import plan_masks
from kvprobe.engine.operations import overwrite
from kvprobe.engine.planner import plan_batch
from kvprobe.engine.shared_prefix import shared_prefix
from kvprobe.engine.sweep import batches
from kvprobe.errors import UnsupportedError
from kvprobe.models.subject import Subject


@dataclass(frozen=True, eq=False)
class Suffix:
    """What running one suffix gave.

    Attributes:
        cache: entries of its own tokens alone; `concat` puts them behind the prefix.
        logits: `[vocab]` at its last token, at least float32.
    """

    cache: KVCache
    logits: Tensor


def run_suffixes(
    subject: Subject,
    prefix: KVCache,
    suffixes: Sequence[Sequence[int]],
    patches: Sequence[Sequence[KVPatch]] | None = None,
    batch_size: int | None = None,
) -> list[Suffix]:
    """Run each suffix after the same prefix, whose keys and values are read once for all of a batch.

    Suffixes of equal length share a forward pass; nothing is padded.

    Args:
        subject: the model.
        prefix: one row of entries that come before every suffix.
        suffixes: token ids, at least one each; positions go on from the prefix.
        patches: for each suffix, patches of the prefix that it sees.
        batch_size: suffixes in one forward pass; by default what memory allows.

    Returns:
        One result each, in order.

    Raises:
        UnsupportedError: an empty prefix or suffix, or not one set of patches for each suffix.
        NoEffectError: a patch that is not declared a no-op changes nothing.
        NumericsError: a logit is not finite.
    """
    if not len(prefix) or prefix.batch != 1 or not all(len(suffix) for suffix in suffixes):
        raise UnsupportedError("Suffixes need a prefix of one row, and at least one token each.")
    rows = [()] * len(suffixes) if patches is None else patches
    if len(rows) != len(suffixes):
        raise UnsupportedError(f"There are {len(rows)} sets of patches for {len(suffixes)} suffixes.")
    check_patches(prefix, (patch for row in rows for patch in row))
    results: dict[int, Suffix] = {}
    by_length: dict[int, list[int]] = {}
    for number, suffix in enumerate(suffixes):
        by_length.setdefault(len(suffix), []).append(number)
    for length, numbers in by_length.items():

        def run(start: int, stop: int, numbers: list[int] = numbers) -> dict[int, Suffix]:
            part = numbers[start:stop]
            made = _run(subject, prefix, [suffixes[n] for n in part], [rows[n] for n in part])
            return dict(zip(part, made, strict=True))

        size = plan_batch(subject, len(prefix) + length, length)
        for part in batches(run, len(numbers), batch_size or size):
            results |= part
    return [results[number] for number in range(len(suffixes))]


def _run(
    subject: Subject, prefix: KVCache, suffixes: Sequence[Sequence[int]], rows: Sequence[Sequence[KVPatch]]
) -> Iterator[Suffix]:
    if not subject.architecture.shares_prefix:
        return _one_by_one(subject, prefix, suffixes, rows)
    count, before = len(suffixes[0]), len(prefix)
    places = int(prefix.positions.max()) + 1 + torch.arange(count)
    axes = prefix.text_axes(places)
    causal = torch.ones(count, before + count, dtype=torch.bool).tril(before)
    plan = plan_masks(subject, places, torch.cat([prefix.positions, places]), causal)
    with shared_prefix(subject, prefix, rows) as past:
        output = call_model(subject, torch.as_tensor(suffixes, dtype=torch.long), places, past, plan, axes=axes)
    logits = logits_of(output, subject)
    entries = [layer.new for layer in past.layers]
    return (
        Suffix(KVCache.computed(((k[n : n + 1], v[n : n + 1]) for k, v in entries), places, axes), logits[n])
        for n in range(len(suffixes))
    )


def _one_by_one(
    subject: Subject, prefix: KVCache, suffixes: Sequence[Sequence[int]], rows: Sequence[Sequence[KVPatch]]
) -> Iterator[Suffix]:
    for suffix, patches in zip(suffixes, rows, strict=True):
        patched = prefix
        for patch in patches:
            patched, _ = overwrite(patched, patch.positions, patch.donor, patch.layers, no_op=True)
        run = forward(subject, suffix, patched)
        yield Suffix(run.cache.take(slice(len(prefix), None)), run.logits)
