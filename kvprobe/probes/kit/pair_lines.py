"""What a pair's lines speak of, and pairs with further segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvprobe.errors import ConfigError
from kvprobe.tasks.context import Span, TokenizedContext
from kvprobe.tasks.extra_lines import Subjects
from kvprobe.tasks.pairs import Pair

Piece = tuple[str, Sequence[int]]
"""A segment's name and its token ids."""


def subjects_of(pair: Pair) -> Subjects:
    """What the lines of a pair speak of.

    Raises:
        ConfigError: the pair does not say its entity, field and values.
    """
    attributes = pair.scenario.attributes
    names = ("entity", "field", "old", "new")
    missing = [name for name in names if name not in attributes]
    if missing:
        raise ConfigError(f"An edit needs pairs that say their {missing[0]}: use task gated_decision.")
    return Subjects(pair.scenario.wording, *(attributes[name] for name in names))


def with_pieces(pair: Pair, segment: str, pieces: Sequence[Piece], tokenizer: Any) -> Pair:
    """The pair with a segment replaced by others in both prompts; `pieces` may name the segment itself again.

    Raises:
        ConfigError: there is no such segment, or it is the one that changes.
    """
    if segment not in pair.base.spans or pair.base.spans[segment] == pair.field:
        known = ", ".join(pair.base.spans)
        raise ConfigError(f"The prompt has no segment {segment!r} beside its field; it has {known}.")
    base, donor = (_replaced(context, segment, pieces, tokenizer) for context in (pair.base, pair.donor))
    (name,) = (name for name, span in pair.base.spans.items() if span == pair.field)
    return replace(pair, base=base, donor=donor, field=base.spans[name], variants={})


def piece_of(pair: Pair, segment: str) -> Piece:
    """A segment of the base prompt as it stands.

    Raises:
        ConfigError: there is no such segment.
    """
    if segment not in pair.base.spans:
        raise ConfigError(f"The prompt has no segment {segment!r}; it has {', '.join(pair.base.spans)}.")
    span = pair.base.spans[segment]
    return segment, pair.base.token_ids[span.start : span.end]


def _replaced(context: TokenizedContext, segment: str, pieces: Sequence[Piece], tokenizer: Any) -> TokenizedContext:
    ids = list(context.token_ids[: min(span.start for span in context.spans.values())])
    spans: dict[str, Span] = {}
    for name, span in context.spans.items():
        own: Sequence[Piece] = [(name, context.token_ids[span.start : span.end])]
        for piece, tokens in pieces if name == segment else own:
            spans[piece] = Span(len(ids), len(ids) + len(tokens))
            ids.extend(tokens)
    return TokenizedContext(tuple(ids), spans, tokenizer.decode(ids))
