"""The KV of images: prompts with images, and an image's entries moved from one prompt into another."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import Forward, forward
from kvprobe.engine.operations import slice_cache, splice
from kvprobe.engine.receipt import Receipt
from kvprobe.engine.visual import VisualPrompt
from kvprobe.errors import UnsupportedError
from kvprobe.models.subject import Subject


def entries_of(cache: KVCache, prompt: VisualPrompt, name: str) -> KVCache:
    """The entries of one image (or other segment) of a prefilled prompt."""
    span = prompt.spans[name]
    return slice_cache(cache, prompt.positions[span.start : span.end])[0]


def prefill_around(subject: Subject, prompt: VisualPrompt, resident: dict[str, KVCache]) -> Forward:
    """A prefill that takes the entries of some segments as they are and runs only the others.

    Entries may come from any other prompt: their keys are moved along all axes to where the segment begins here.

    Args:
        subject: the model.
        prompt: its last token is run, and no segment may stand at its very start.
        resident: entries of segments by name, as many as the segment has tokens.

    Raises:
        UnsupportedError: entries do not fit their segment, or the decision token would come from a cache.
    """
    unknown = sorted(set(resident) - set(prompt.spans))
    if unknown:
        raise UnsupportedError(f"The prompt has no segment {unknown[0]!r} to put entries in.")
    order = sorted(resident, key=lambda name: prompt.spans[name].start)
    cost, done = Receipt(), 0
    cache: KVCache | None = None
    for name in order:
        span, entries = prompt.spans[name], resident[name]
        if len(entries) != len(span) or not span.start:
            raise UnsupportedError(
                f"Segment {name!r} at token {span.start} has {len(span)} tokens and {len(entries)} entries were given."
            )
        if span.start > done:
            result = _run(subject, prompt, cache, range(done, span.start), order)
            cache, cost = result.cache, cost + result.receipt
        assert cache is not None
        cache, moving = splice(subject, cache, entries, prompt.positions[span.start])
        cost, done = cost + moving, span.end
    if done == len(prompt.token_ids):
        raise UnsupportedError("The last token must be run: its logits are the answer.")
    result = _run(subject, prompt, cache, range(done, len(prompt.token_ids)), order)
    cost = cost + result.receipt
    held = sum(len(entries) for entries in resident.values())
    return Forward(result.cache, result.logits, replace(cost, tokens_reused=held - cost.tokens_rotated))


def _run(
    subject: Subject, prompt: VisualPrompt, cache: KVCache | None, tokens: range, resident: Collection[str]
) -> Forward:
    """The tokens of a prompt in `tokens` after `cache`, with those images among them that are not resident."""
    images = [
        image for name, image in prompt.images.items() if prompt.spans[name].start in tokens and name not in resident
    ]
    return forward(
        subject,
        prompt.token_ids[tokens.start : tokens.stop],
        cache,
        positions=prompt.positions[tokens.start : tokens.stop],
        axes=prompt.axes[:, tokens.start : tokens.stop],
        images=images,
    )
