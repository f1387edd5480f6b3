"""Many interventions on one base, the decision token alone being run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import call_model, logits_of
from kvprobe.engine.interventions import AttentionKnockout, KVPatch, PatchRow, check_patches
from kvprobe.engine.masks import plan_masks
from kvprobe.engine.planner import plan_batch
from kvprobe.engine.shared_prefix import cache_of_rows
from kvprobe.errors import OutOfMemoryError, UnsupportedError
from kvprobe.models.subject import Subject

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Decision:
    """Logits `[vocab]` at the decision position and, when asked for, attention `[layer, head, key]` of its token."""

    logits: Tensor
    attention: Tensor | None


def run_patches(
    subject: Subject,
    base_ids: Sequence[int],
    base_cache: KVCache,
    patches: Sequence[PatchRow],
    batch_size: int | None = None,
    *,
    reduce: Callable[[Tensor], Tensor] | None = None,
    reference: bool = False,
) -> Tensor:
    """The decision under each of many interventions.

    Only the last token of `base_ids` is run, all rows on one shared cache of which each changes a few entries; a
    batch that runs out of memory is halved and run again.

    Args:
        subject: the model.
        base_ids: the whole prompt.
        base_cache: its cache, with or without the decision token's own entry (which is never used).
        patches: one row each: an intervention or several together, an empty sequence for the base itself.
        batch_size: rows in one forward pass; by default what memory allows.
        reduce: applied to the logits `[row, vocab]` of each batch, to keep less than a whole vocabulary per row.
        reference: lay a whole cache out for every row and use the model's own attention, as a check.

    Returns:
        On the CPU, `[row, vocab]` or what `reduce` makes of it, in the order of `patches`.

    Raises:
        NoEffectError: an intervention that is not declared a no-op changes nothing.
        OutOfMemoryError: not even one row fits.
        NumericsError: a logit is not finite.
    """
    past, position = before_decision(base_ids, base_cache)
    rows = [as_row(row) for row in patches]
    check_patches(past, (item for row in rows for item in row if isinstance(item, KVPatch)))

    def run(start: int, stop: int) -> Tensor:
        logits, _ = _decide(subject, base_ids[-1], position, past, rows[start:stop], reference=reference)
        return (logits if reduce is None else reduce(logits)).cpu()

    return in_batches(run, len(rows), batch_size or plan_batch(subject, len(past) + 1, laid_out=reference))


def decide(
    subject: Subject,
    base_ids: Sequence[int],
    base_cache: KVCache,
    interventions: PatchRow = (),
    *,
    attention: bool = False,
) -> Decision:
    """The decision under one set of interventions; arguments as in `run_patches`.

    Raises:
        UnsupportedError: attention weights are asked of a fused kernel.
    """
    past, position = before_decision(base_ids, base_cache)
    row = as_row(interventions)
    check_patches(past, (item for item in row if isinstance(item, KVPatch)))
    logits, weights = _decide(subject, base_ids[-1], position, past, [row], attention=attention)
    return Decision(logits[0], None if weights is None else weights[0])


def as_row(row: PatchRow) -> tuple[KVPatch | AttentionKnockout, ...]:
    """The interventions of one row."""
    return (row,) if isinstance(row, KVPatch | AttentionKnockout) else tuple(row)


def before_decision(base_ids: Sequence[int], cache: KVCache) -> tuple[KVCache, int]:
    """The cache up to the decision token, and that token's position.

    Raises:
        UnsupportedError: prompt and cache do not fit, or there is more than one row.
    """
    before = len(base_ids) - 1
    if cache.batch != 1 or len(cache) not in (before, before + 1) or not before:
        raise UnsupportedError(
            f"A prompt of {len(base_ids)} tokens needs a cache of one row and {before} or {before + 1} entries, not "
            f"{cache.batch} rows and {len(cache)} entries."
        )
    position = int(cache.positions[before]) if len(cache) > before else int(cache.positions[-1]) + 1
    return cache.take(slice(0, before)), position


def _decide(
    subject: Subject,
    token_id: int,
    position: int,
    past: KVCache,
    rows: Sequence[Sequence[KVPatch | AttentionKnockout]],
    *,
    attention: bool = False,
    reference: bool = False,
) -> tuple[Tensor, Tensor | None]:
    place = torch.tensor([position])
    knockouts = [[item for item in row if isinstance(item, AttentionKnockout)] for row in rows]
    keys = torch.cat([past.positions, place])
    plan = plan_masks(subject, place, keys, torch.ones(1, len(keys), dtype=torch.bool), knockouts)
    patches = [[item for item in row if isinstance(item, KVPatch)] for row in rows]
    ids = torch.full((len(rows), 1), token_id, dtype=torch.long)
    with cache_of_rows(subject, past, patches, laid_out=reference or attention) as cache:
        output = call_model(subject, ids, place, cache, plan, axes=past.text_axes(place), attention=attention)
    weights = torch.stack([layer[:, :, 0] for layer in output.attentions], dim=1) if attention else None
    return logits_of(output, subject), weights


def in_batches(run: Callable[[int, int], Tensor], count: int, size: int) -> Tensor:
    """What `batches` gives, joined.

    Raises:
        OutOfMemoryError: not even one row fits.
        UnsupportedError: there is no row.
    """
    results = batches(run, count, size)
    if not results:
        raise UnsupportedError("A sweep needs at least one intervention.")
    return torch.cat(results)


def batches(run: Callable[[int, int], Result], count: int, size: int) -> list[Result]:
    """`run(start, stop)` over all of `count` rows; a batch that runs out of memory is halved and run again.

    Raises:
        OutOfMemoryError: not even one row fits.
    """
    results: list[Result] = []
    start = 0
    while start < count:
        stop = min(start + size, count)
        try:
            results.append(run(start, stop))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            exhausted = True
        else:
            exhausted = False
            start = stop
        # Outside the except block, where the failed pass's tensors are no longer held by its traceback.
        if exhausted:
            if stop - start == 1:
                raise OutOfMemoryError("Not even one row of the sweep fits in memory; shorten the prompt.")
            size = (stop - start) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return results


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        phrase in said for phrase in ("out of memory", "not enough memory", "can't allocate memory")
    )
