"""From a task's prompt to a composition: which of its segments are chunks, and what those were compiled behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from kvprobe.composing.base import Composed, Composition, Part
from kvprobe.composing.chunk import Chunk, Header, compile_behind
from kvprobe.edit.base import CachedPrompt
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.tasks.context import Context, Segment, Span, TokenizedContext, tokenize

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

BEGINNING = "bos"
"""The part that holds tokens before the first segment."""


def composition(subject: Subject, parts: Sequence[tuple[str, str | Chunk]]) -> Composition:
    """A prompt from named texts and chunks, in order; texts are encoded as in a task's prompt, a BOS token first.

    Raises:
        ConfigError: no part, or as `Composition`.
    """
    if not parts:
        return Composition(())
    # A chunk's tokens are its own, and a text behind it stands inside the prompt.
    segments = (Segment(name, given) if isinstance(given, str) else Segment(name, "", ids=()) for name, given in parts)
    plain = tokenize(Context(tuple(segments)), subject.tokenizer)
    first = parts[0][1]
    opening = plain.token_ids[: plain.spans[parts[0][0]].start]
    # A chunk at the start that begins a text itself needs no second token for that.
    has_own = isinstance(first, Chunk) and first.token_ids[: len(opening)] == opening
    pieces = [Part(BEGINNING, opening)] if opening and not has_own else []
    for name, given in parts:
        span = plain.spans[name]
        ids = plain.token_ids[span.start : span.end]
        pieces.append(Part(name, ids) if isinstance(given, str) else Part.reused(name, given))
    return Composition(tuple(pieces))


def compile_segment(subject: Subject, prompt: TokenizedContext, name: str, header: Header = "bos") -> Chunk:
    """One segment of a prompt, compiled apart from it, or (header `real`) behind what stands before it there.

    Raises:
        ConfigError, UnsupportedError: there is no such segment; else as `precompile`.
    """
    span = _span(prompt, name)
    ids = prompt.token_ids
    return compile_behind(subject, ids[span.start : span.end], header, ids[: span.start])


def composition_of(
    prompt: TokenizedContext, chunks: Mapping[str, Chunk], *, without: Sequence[str] = ()
) -> Composition:
    """The prompt as a composition in which some segments are chunks and some are left out.

    A chunk may hold other tokens than the segment it stands for, as controls want.

    Raises:
        ConfigError: there is no such segment, or the last one is to be a chunk.
    """
    for name in (*chunks, *without):
        _span(prompt, name)
    parts = []
    for name, span in _all_spans(prompt):
        ids = prompt.token_ids[span.start : span.end]
        if ids and name not in without:
            parts.append(Part.reused(name, chunks[name]) if name in chunks else Part(name, ids))
    return Composition(tuple(parts))


def merged(prompt: TokenizedContext, name: str, segments: Sequence[str]) -> TokenizedContext:
    """The prompt with neighbouring segments as one, so that a chunk can hold them all; its tokens are the same.

    Raises:
        ConfigError: there is no such segment, they are no neighbours in that order, or the name is taken.
    """
    for segment in segments:
        _span(prompt, segment)
    joined = span_of_neighbours(prompt.spans, segments)
    kept = {other: span for other, span in prompt.spans.items() if other not in segments}
    if name in kept:
        raise ConfigError(f"The prompt has a segment {name!r} already; choose another name.")
    whole = {**kept, name: joined}
    return replace(prompt, spans=dict(sorted(whole.items(), key=lambda item: item[1])))


def span_of_neighbours(spans: Mapping[str, Span], segments: Sequence[str]) -> Span:
    """From the first of the segments to the last.

    Raises:
        ConfigError: there are none, or they do not follow one another in that order.
    """
    if not segments or any(spans[left].end != spans[right].start for left, right in pairwise(segments)):
        raise ConfigError(f"The segments {', '.join(segments)} do not follow one another in the prompt.")
    return Span(spans[segments[0]].start, spans[segments[-1]].end)


def as_cached_prompt(composed: Composed, spans: Mapping[str, Span] | None = None) -> CachedPrompt:
    """The composed prompt as one that can be edited (`EditableContext.from_prompt`, every edit method).

    Args:
        composed: without gaps.
        spans: in place of its parts', such as a field's and of what is beside it inside a chunk; none in another.

    Raises:
        ConfigError: spans overlap.
        UnsupportedError: its positions have gaps, as under `prompt_cache`.
    """
    if not composed.is_contiguous:
        raise UnsupportedError(
            "This composed prompt has gaps between its positions, and edits need 0, 1, 2, ...; compose by another "
            "scheme, such as 'splice'."
        )
    ordered = sorted((spans or {}).items(), key=lambda item: item[1])
    for (name, span), (other, following) in pairwise(ordered):
        if following.start < span.end:
            raise ConfigError(
                f"The spans {name!r} and {other!r} overlap; cut the outer one into what is beside the inner."
            )
    return CachedPrompt(composed.token_ids, composed.spans if spans is None else dict(spans), composed.cache)


def _all_spans(prompt: TokenizedContext) -> list[tuple[str, Span]]:
    spans = sorted(prompt.spans.items(), key=lambda item: item[1])
    first = spans[0][1].start
    return [(BEGINNING, Span(0, first)), *spans] if first else spans


def _span(prompt: TokenizedContext, name: str) -> Span:
    if name not in prompt.spans:
        raise ConfigError(f"The prompt has no segment {name!r}; it has {', '.join(prompt.spans)}.")
    return prompt.spans[name]
