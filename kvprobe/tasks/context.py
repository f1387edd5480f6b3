"""Prompts as named segments whose token spans are exact by construction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kvprobe.errors import AlignmentError, ConfigError
from kvprobe.viewing import Viewable

_ANCHORS = ("\n", "|", ":", "x")
_DECODED_WITH = 8
"""Tokens before a token that decide how it is decoded."""


@dataclass(frozen=True, order=True)
class Span:
    """A half-open range of token positions `[start, end)`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def positions(self) -> range:
        """The positions of the span."""
        return range(self.start, self.end)


@dataclass(frozen=True)
class Segment:
    """A named piece of prompt text, such as the field's value or the policy."""

    name: str
    text: str


@dataclass(frozen=True)
class Context:
    """An ordered list of segments; names may not repeat.

    Raises:
        ConfigError: two segments share a name.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        names = [segment.name for segment in self.segments]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"Segment names must be unique in a context; rename one of {', '.join(repeated)}.")

    @classmethod
    def of(cls, *named_texts: tuple[str, str]) -> Context:
        """A context from `(name, text)` pairs; empty texts are left out."""
        return cls(tuple(Segment(name, text) for name, text in named_texts if text))

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(segment.text for segment in self.segments)

    def replace(self, name: str, text: str) -> Context:
        """This context with another text in segment `name`."""
        if name not in {segment.name for segment in self.segments}:
            raise ConfigError(f"The context has no segment {name!r} to replace.")
        return Context(tuple(Segment(s.name, text) if s.name == name else s for s in self.segments))

    def insert_before(self, name: str, segment: Segment) -> Context:
        """This context with `segment` put right before segment `name`."""
        place = [s.name for s in self.segments].index(name)
        return Context((*self.segments[:place], segment, *self.segments[place:]))


@dataclass(frozen=True)
class TokenizedContext(Viewable):
    """Token ids of a context with the exact span of every segment.

    `source` and `tokenizer` are what it was made from; nothing but its look in a notebook depends on them.
    """

    token_ids: tuple[int, ...]
    spans: dict[str, Span]
    text: str
    source: Context | None = field(default=None, repr=False, compare=False)
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def decision_position(self) -> int:
        """The last prompt token: always re-run, never taken from a cache."""
        return len(self.token_ids) - 1

    @property
    def token_hash(self) -> str:
        """sha256 of the token ids, recorded with every result."""
        return hashlib.sha256(repr(self.token_ids).encode()).hexdigest()

    def segment_of(self, position: int) -> str:
        """Name of the segment that holds `position` (`bos` before the first)."""
        for name, span in self.spans.items():
            if span.start <= position < span.end:
                return name
        return "bos"

    def token_texts(self) -> list[str]:
        """The share of each token in `text`; joined they are all of it.

        A token that stands for no text, or for a further part of a character, has an empty share. Without the source
        the ids stand for the text.
        """
        if self.source is None or self.tokenizer is None:
            return [f"⟨{token}⟩" for token in self.token_ids]
        shares = [_segment_texts(segment.text, self.tokenizer) for segment in self.source.segments]
        texts = [text for share in shares for text in share]
        return [""] * (len(self.token_ids) - len(texts)) + texts

    def __repr__(self) -> str:
        spans = ", ".join(f"{name} {span.start}:{span.end}" for name, span in self.spans.items())
        return f"TokenizedContext({len(self.token_ids)} tokens; {spans})"


def tokenize(context: Context, tokenizer: Any) -> TokenizedContext:
    """Tokenise a context segment by segment.

    The rule at the joints: each segment is encoded as it would be in the middle of a text, so that no
    token ever crosses a joint and the tokens of one segment never depend on another's text. A BOS token is
    put first exactly once, when the tokenizer has one and the text does not begin with it.
    """
    ids: list[int] = []
    spans: dict[str, Span] = {}
    if _wants_bos(context.text, tokenizer):
        ids.append(tokenizer.bos_token_id)
    for segment in context.segments:
        piece = encode_segment(segment.text, tokenizer)
        spans[segment.name] = Span(len(ids), len(ids) + len(piece))
        ids.extend(piece)
    return TokenizedContext(tuple(ids), spans, context.text, context, tokenizer)


def encode_segment(text: str, tokenizer: Any) -> list[int]:
    """Token ids of `text` as it would be encoded in the middle of a text.

    Sentencepiece-like tokenizers put a space before a text that stands alone; encoding it behind an
    anchor and dropping the anchor avoids that.
    """
    return _behind_anchor(text, tokenizer)[1]


def _behind_anchor(text: str, tokenizer: Any) -> tuple[str, list[int]]:
    for anchor in _ANCHORS:
        prefix = _anchor_ids(tokenizer, anchor)
        ids = tokenizer.encode(anchor + text, add_special_tokens=False)
        if tuple(ids[: len(prefix)]) == prefix:
            return anchor, list(ids[len(prefix) :])
    raise AlignmentError(f"The tokenizer merges {text[:20]!r} with whatever stands before it; begin it with a space.")


def _segment_texts(text: str, tokenizer: Any) -> list[str]:
    """The share of each token of `encode_segment` in its text; blanks go with the token that follows them."""
    anchor, ids = _behind_anchor(text, tokenizer)
    if not ids:
        return []
    whole, start, texts = anchor + text, len(anchor), []
    offsets = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for _, end in offsets[-len(ids) : -1]:
        texts.append(whole[start : max(start, end)])
        start = max(start, end)
    return [*texts, whole[start:]]


@lru_cache(maxsize=256)
def _anchor_ids(tokenizer: Any, anchor: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(anchor, add_special_tokens=False))


def _wants_bos(text: str, tokenizer: Any) -> bool:
    if tokenizer.bos_token_id is None or text.startswith(tokenizer.bos_token or "\0"):
        return False
    # Qwen tokenizers name a BOS-like token but never prepend it.
    return tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]


def answer_token(word: str, rivals: Iterable[str], tokenizer: Any) -> int:
    """The single token that stands for answer `word` after a cue that ends in a colon.

    Raises:
        AlignmentError: the word is several tokens, or begins with the same token as a rival.
    """
    ids = encode_segment(f" {word}", tokenizer)
    if len(ids) != 1:
        pieces = tokenizer.convert_ids_to_tokens(ids)
        raise AlignmentError(f"The answer {word!r} is {len(ids)} tokens ({pieces}); choose a single-token word.")
    for rival in rivals:
        if encode_segment(f" {rival}", tokenizer)[0] == ids[0]:
            raise AlignmentError(f"The answers {word!r} and {rival!r} begin with the same token; choose others.")
    return ids[0]


def show_tokens(ids: Sequence[int], tokenizer: Any) -> str:
    """Token ids as readable pieces, for error messages."""
    return " ".join(repr(tokenizer.decode([token])) for token in ids)


def decoded_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The share of each token in `tokenizer.decode(token_ids)`; a character of several tokens goes to the last."""
    texts, last = [], len(token_ids) - 1
    for position in range(len(token_ids)):
        start = max(0, position - _DECODED_WITH)
        before = tokenizer.decode(token_ids[start:position]).rstrip("\ufffd") if position > start else ""
        whole = tokenizer.decode(token_ids[start : position + 1])
        texts.append((whole if position == last else whole.rstrip("\ufffd"))[len(before) :])
    return texts
