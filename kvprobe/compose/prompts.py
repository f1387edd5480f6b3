"""From a task's prompt to a composition: which of its segments are chunks, and what those were compiled behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvprobe.compose.base import Composed, Composition, Part
from kvprobe.compose.chunk import Chunk, Header, precompile
from kvprobe.edit.base import CachedPrompt
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.tasks.context import Span, TokenizedContext

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

BEGINNING = "bos"
"""The part that holds tokens before the first segment."""


def compile_segment(subject: Subject, prompt: TokenizedContext, name: str, header: Header = "bos") -> Chunk:
    """One segment of a prompt, compiled apart from it, or (header `real`) behind what stands before it there.

    Raises:
        ConfigError, UnsupportedError: there is no such segment; else as `precompile`.
    """
    span = _span(prompt, name)
    before = prompt.token_ids[: span.start] if header == "real" else ()
    # At the very start of a prompt nothing stands before a segment, so being compiled alone is being compiled there.
    return precompile(
        subject,
        prompt.token_ids[span.start : span.end],
        header if before or header != "real" else "none",
        before=before,
    )


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


def as_cached_prompt(composed: Composed) -> CachedPrompt:
    """The composed prompt as one that can be edited (`EditableContext.from_prompt`, every edit method).

    Raises:
        UnsupportedError: its positions have gaps, as under `prompt_cache`.
    """
    if not composed.is_contiguous:
        raise UnsupportedError(
            "This composed prompt has gaps between its positions, and edits need 0, 1, 2, ...; compose by another "
            "scheme, such as 'splice'."
        )
    return CachedPrompt(composed.token_ids, composed.spans, composed.cache)


def _all_spans(prompt: TokenizedContext) -> list[tuple[str, Span]]:
    spans = sorted(prompt.spans.items(), key=lambda item: item[1])
    first = spans[0][1].start
    return [(BEGINNING, Span(0, first)), *spans] if first else spans


def _span(prompt: TokenizedContext, name: str) -> Span:
    if name not in prompt.spans:
        raise ConfigError(f"The prompt has no segment {name!r}; it has {', '.join(prompt.spans)}.")
    return prompt.spans[name]
