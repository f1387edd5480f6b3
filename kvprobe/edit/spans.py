"""Spans taken out of a cached prompt, or put in: what stays in the cache still holds what it read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvprobe.edit.base import CachedPrompt, Edited
from kvprobe.edit.splicing import moved_spans, rerun_from
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward
from kvprobe.engine.operations import concat, reposition
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.tasks.context import Span

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Removal = Literal["gap", "rotated", "recomputed"]
"""What becomes of the entries behind a removed span. `gap` leaves them where they are, as eviction does, with nothing
at the removed positions; `rotated` moves them up; `recomputed` runs them again, which equals a prefill."""
Insertion = Literal["rotated", "recomputed"]
"""What becomes of the entries behind an inserted span."""


def removed(subject: Subject, prompt: CachedPrompt, names: Sequence[str], behind: Removal = "recomputed") -> Edited:
    """The prompt without some segments.

    Args:
        subject: the model.
        prompt: the prompt and its cache.
        names: of the segments.
        behind: what becomes of the entries behind each.

    Raises:
        ConfigError: there is no such segment, it holds the first or the last token, or `behind` is none of the ways.
        UnsupportedError: the prompt has gaps, or the model's RoPE scaling does not allow moving what comes after.
    """
    _check(behind, Removal)
    prompt.refuse_gaps()
    lines = sorted((prompt.span(name) for name in names), reverse=True)
    spans = prompt.spans
    for name in names:
        spans = moved_spans(spans, name, 0)
    spans = {name: span for name, span in spans.items() if name not in names}
    ids, cache, cost = prompt.token_ids, prompt.cache, Receipt(tokens_reused=len(prompt.cache))
    # From the last to the first, so that no removal moves what is still to go.
    for line in lines:
        if line.start == 0 or line.end >= len(prompt.token_ids):
            raise ConfigError("The prompt's first and last token stay; remove a segment that holds neither.")
        ids = (*ids[: line.start], *ids[line.end :])
        if behind != "recomputed":
            cache, turning = _without(subject, cache, line, behind)
            cost = cost + turning
    if behind == "recomputed":
        return rerun_from(subject, prompt.cache, lines[-1].start, ids, spans)
    return Edited(CachedPrompt(ids, spans, cache, gaps=behind == "gap"), cost)


def _without(subject: Subject, cache: KVCache, line: Span, behind: Removal) -> tuple[KVCache, Receipt]:
    before, after = cache.take(slice(0, line.start)), cache.take(slice(line.end, None))
    if not len(after):
        return before, Receipt()
    after, cost = reposition(subject, after, -len(line)) if behind == "rotated" else (after, Receipt())
    return concat(before, after)[0], cost


def inserted(
    subject: Subject,
    prompt: CachedPrompt,
    name: str,
    ids: Sequence[int],
    *,
    before: str,
    behind: Insertion = "recomputed",
) -> Edited:
    """The prompt with a new segment, whose entries are computed on what stands before it.

    Args:
        subject: the model.
        prompt: the prompt and its cache.
        name: of the new segment.
        ids: its tokens.
        before: the segment that it is put in front of.
        behind: what becomes of the entries behind it.

    Raises:
        ConfigError: there is no such segment, or `behind` is none of the ways.
        UnsupportedError: nothing to insert, the prompt has gaps, or the model's RoPE scaling does not allow moving what
            comes after.
    """
    _check(behind, Insertion)
    prompt.refuse_gaps()
    if not ids:
        raise UnsupportedError(f"The inserted segment {name!r} is empty; give at least one word.")
    start = prompt.span(before).start
    spans: dict[str, Span] = {}
    for segment, span in prompt.spans.items():
        if segment == before:
            spans[name] = Span(start, start + len(ids))
        added = len(ids) if span.start >= start else 0
        spans[segment] = Span(span.start + added, span.end + added)
    whole = (*prompt.token_ids[:start], *ids, *prompt.token_ids[start:])
    if behind == "recomputed":
        return rerun_from(subject, prompt.cache, start, whole, spans)
    first, after = prompt.cache.take(slice(0, start)), prompt.cache.take(slice(start, None))
    made = forward(subject, ids, first)
    cache, cost = made.cache, made.receipt
    if len(after):
        moved, turning = reposition(subject, after, len(ids))
        cache, cost = concat(cache, moved)[0], cost + turning
    return Edited(CachedPrompt(whole, spans, cache), cost, tuple(spans[name].positions))


def _check(behind: str, ways: Any) -> None:
    if behind not in get_args(ways):
        known = ", ".join(get_args(ways))
        raise ConfigError(f"The entries behind a span are {known}, not {behind!r}; choose one of them.")
