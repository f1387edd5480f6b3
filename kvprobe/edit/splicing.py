"""The moves all edit methods are made of: new tokens in a place, what follows rotated or run anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvprobe.edit.base import CachedPrompt, Edited, FieldEdit
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward
from kvprobe.engine.operations import concat, reposition
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import UnsupportedError
from kvprobe.models.subject import Subject
from kvprobe.tasks.context import Span


def shared_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts have in common from the first on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def with_new_value(stale: CachedPrompt, edit: FieldEdit) -> tuple[tuple[int, ...], dict[str, Span]]:
    """Token ids and spans of the prompt with the new value in its place."""
    stale.span(edit.field)
    return with_segment_replaced(stale.token_ids, stale.spans, edit.field, edit.new_ids)


def with_segment_replaced(
    token_ids: Sequence[int], spans: Mapping[str, Span], name: str, new_ids: Sequence[int]
) -> tuple[tuple[int, ...], dict[str, Span]]:
    """Token ids and spans with other tokens in one segment."""
    span = spans[name]
    return (*token_ids[: span.start], *new_ids, *token_ids[span.end :]), moved_spans(spans, name, len(new_ids))


def moved_spans(spans: Mapping[str, Span], changed: str, length: int) -> dict[str, Span]:
    """Spans after the segment `changed` has become `length` tokens long."""
    old = spans[changed]
    delta = length - len(old)
    return {
        name: Span(old.start, old.start + length)
        if name == changed
        else Span(span.start + delta, span.end + delta)
        if span.start >= old.end
        else span
        for name, span in spans.items()
    }


def rerun_from(
    subject: Subject, cache: KVCache, start: int, token_ids: Sequence[int], spans: Mapping[str, Span]
) -> Edited:
    """A prompt whose first `start` entries are those of `cache` and whose others are computed now, but the last."""
    kept, new = cache.take(slice(0, start)), token_ids[start:-1]
    if not new:
        return Edited(CachedPrompt(tuple(token_ids), spans, kept), Receipt(tokens_reused=len(kept)))
    result = forward(subject, new, kept)
    return Edited(
        CachedPrompt(tuple(token_ids), spans, result.cache), result.receipt, tuple(range(start, len(token_ids) - 1))
    )


def field_in_place(subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
    """The stale prompt with the new value's own keys and values in its place, computed on the prefix.

    A value of another length moves what follows: its keys are rotated from their originals to their new positions.

    Raises:
        UnsupportedError: the new value is empty.
    """
    span = stale.span(edit.field)
    if not edit.new_ids:
        raise UnsupportedError(f"The new value of {edit.field!r} is empty; an edit needs at least one token.")
    ids, spans = with_new_value(stale, edit)
    before, after = stale.cache.take(slice(0, span.start)), stale.cache.take(slice(span.end, None))
    value = forward(subject, edit.new_ids, before)
    cost, cache = value.receipt, value.cache
    if len(after):
        moved, turning = reposition(subject, after, len(edit.new_ids) - len(span))
        cache, _ = concat(cache, moved)
        cost = cost + turning
    new = Span(span.start, span.start + len(edit.new_ids))
    return Edited(CachedPrompt(ids, spans, cache), cost, tuple(new.positions))


def appended(subject: Subject, stale: CachedPrompt, edit: FieldEdit, line: Sequence[int], name: str) -> Edited:
    """The stale prompt with a further line before `edit.insert_before`; it and all after it are run.

    A line of the same name that stands there already, from an earlier edit, is taken out.

    Raises:
        UnsupportedError: there is no line to append.
    """
    if not line:
        raise UnsupportedError(f"There is no line that says the change of {edit.field!r}; give one.")
    block = stale.span(edit.insert_before)
    earlier = stale.spans.get(name)
    start, rest = (block.start, block.start) if earlier is None else (earlier.start, earlier.end)
    ids = (*stale.token_ids[:start], *stale.token_ids[rest : block.start], *line, *stale.token_ids[block.start :])
    return rerun_from(subject, stale.cache, start, ids, _spans_with_line(stale, edit.insert_before, line, name))


def _spans_with_line(stale: CachedPrompt, insert_before: str, line: Sequence[int], name: str) -> dict[str, Span]:
    block, earlier = stale.spans[insert_before], stale.spans.get(name, Span(0, 0))
    spans: dict[str, Span] = {}
    for segment, span in stale.spans.items():
        if segment == name:
            continue
        if segment == insert_before:
            start = block.start - len(earlier)
            spans[name] = Span(start, start + len(line))
        # Moved by what is put in and taken out before it: tokens of no segment (a hoisted line's) stay where they are.
        added = len(line) if span.start >= block.start else 0
        delta = added - (len(earlier) if span.start >= earlier.end else 0)
        spans[segment] = Span(span.start + delta, span.end + delta)
    return spans
