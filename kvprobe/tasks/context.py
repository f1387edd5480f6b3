"""Prompts as named segments, tokenised whole; spans are found by the characters of the tokens."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from kvprobe.errors import AlignmentError, ConfigError
from kvprobe.tasks.encoding import Encoding, encode_text, opening_ids
from kvprobe.viewing import Viewable

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
    """A named piece of prompt text, such as the field's value or the policy.

    Args:
        name: of the segment.
        text: what it says.
        control: whether control tokens in it (`<|im_end|>`) are meant as such; else they are text.
        ids: its tokens where they are given and not to be read off the text.
    """

    name: str
    text: str
    control: bool = False
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Context:
    """An ordered list of segments; names may not repeat.

    Args:
        segments: the pieces.
        opened: whether they bring their own first token (BOS), as a chat template's text does.
        apart: whether each is tokenised apart from its neighbours, as the parts of a composed prompt are.
        turns: what was said before, as `(user, assistant)`; `kvprobe.tasks.chat` puts it into the prompt.

    Raises:
        ConfigError: two segments share a name.
    """

    segments: tuple[Segment, ...]
    opened: bool = False
    apart: bool = False
    turns: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [segment.name for segment in self.segments]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"Segment names must be unique in a context; rename one of {', '.join(repeated)}.")

    @classmethod
    def of(cls, *named_texts: tuple[str, str]) -> Context:
        """A context from `(name, text)` pairs; empty texts are left out."""
        return cls(tuple(Segment(name, text) for name, text in named_texts if text))

    def runs(self) -> Iterator[tuple[Segment, ...]]:
        """The segments that are tokenised together; one with tokens of its own stands alone."""
        keys = ((self.apart or segment.ids is not None) and place + 1 for place, segment in enumerate(self.segments))
        for _, run in groupby(zip(keys, self.segments, strict=True), key=lambda pair: pair[0]):
            yield tuple(segment for _, segment in run)

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(segment.text for segment in self.segments)

    def replace(self, name: str, text: str) -> Context:
        """This context with another text in segment `name`."""
        if name not in {segment.name for segment in self.segments}:
            raise ConfigError(f"The context has no segment {name!r} to replace.")
        return replace(self, segments=tuple(Segment(s.name, text) if s.name == name else s for s in self.segments))

    def without(self, *names: str) -> Context:
        """This context without some segments."""
        return replace(self, segments=tuple(segment for segment in self.segments if segment.name not in names))

    def insert_before(self, name: str, segment: Segment) -> Context:
        """This context with `segment` put right before segment `name`."""
        place = [s.name for s in self.segments].index(name)
        return replace(self, segments=(*self.segments[:place], segment, *self.segments[place:]))


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

    def ids_of(self, name: str) -> tuple[int, ...]:
        """The tokens of a segment; none if there is no such segment."""
        span = self.spans.get(name, Span(0, 0))
        return self.token_ids[span.start : span.end]

    def token_texts(self) -> list[str]:
        """The share of each token in `text`; joined they are all of it.

        A token that stands for no text has an empty share; a character of several tokens goes to the last. Without the
        source the ids stand for the text.
        """
        if self.source is None or self.tokenizer is None:
            return [f"⟨{token}⟩" for token in self.token_ids]
        texts: list[str] = []
        for segments in self.source.runs():
            inside = segments[0] is not self.source.segments[0]
            texts += (
                _shares(segments, self.tokenizer, inside=inside)
                if segments[0].ids is None
                else decoded_texts(segments[0].ids, self.tokenizer)
            )
        return [""] * (len(self.token_ids) - len(texts)) + texts

    def __repr__(self) -> str:
        spans = ", ".join(f"{name} {span.start}:{span.end}" for name, span in self.spans.items())
        return f"TokenizedContext({len(self.token_ids)} tokens; {spans})"


def tokenize(context: Context, tokenizer: Any, exact: Collection[str] = ()) -> TokenizedContext:
    """Tokenise a context whole, as the model is served it, and find its segments by their characters.

    Tokens that the tokenizer puts before every text (BOS) come first, unless the context brings its own. A token that
    reaches over a joint belongs to the segment that it begins in.

    Args:
        context: the prompt.
        tokenizer: a fast Hugging Face tokenizer.
        exact: segments that must begin and end with a token.

    Raises:
        AlignmentError: a token reaches over an edge of one of those.
        ConfigError, UnsupportedError: see `encode_text`.
    """
    opening = () if context.opened else opening_ids(tokenizer)
    ids = list(opening)
    spans: dict[str, Span] = {}
    for segments in context.runs():
        given = segments[0].ids
        if given is not None:
            spans[segments[0].name] = Span(len(ids), len(ids) + len(given))
            ids += given
            continue
        encoding, edges = _encoded_run(segments, tokenizer, inside=segments[0] is not context.segments[0])
        if segments[0].control and encoding.ids[: len(opening)] == opening == tuple(ids):
            ids.clear()
        places = [bisect_left(encoding.offsets, (edge, edge)) for edge in edges[:-1]] + [len(encoding.ids)]
        for number, segment in enumerate(segments):
            if segment.name in exact:
                _check_edges(segments, number, encoding, edges, tokenizer)
            spans[segment.name] = Span(len(ids) + places[number], len(ids) + places[number + 1])
        ids += encoding.ids
    return TokenizedContext(tuple(ids), spans, context.text, context, tokenizer)


def encode_segment(text: str, tokenizer: Any) -> list[int]:
    """Token ids of `text` as it would be encoded in the middle of a text; control tokens are text."""
    return list(encode_text(text, tokenizer, inside=True).ids) if text else []


def _encoded_run(segments: Sequence[Segment], tokenizer: Any, *, inside: bool) -> tuple[Encoding, list[int]]:
    """The segments' text whole, and the characters at which they begin and the last one ends."""
    edges = list(accumulate((len(segment.text) for segment in segments), initial=0))
    asked = [(edges[number], edges[number + 1]) for number, segment in enumerate(segments) if segment.control]
    return encode_text("".join(segment.text for segment in segments), tokenizer, asked, inside=inside), edges


def _check_edges(
    segments: Sequence[Segment], number: int, encoding: Encoding, edges: Sequence[int], tokenizer: Any
) -> None:
    for side, at in (("before", edges[number]), ("after", edges[number + 1])):
        over = next((i for i, (start, end) in enumerate(encoding.offsets) if start < at < end), None)
        if over is None:
            continue
        segment, text = segments[number], "".join(each.text for each in segments)
        start, end = encoding.offsets[over]
        raise AlignmentError(
            f"The tokenizer joins {segment.text.strip()!r} of {segment.name!r} with what stands {side} it: "
            f"{text[start:end]!r} is one token, so the value cannot be exchanged alone; "
            f"{_mend(segments, number, side, tokenizer)}."
        )


def _mend(segments: Sequence[Segment], number: int, side: str, tokenizer: Any) -> str:
    """A wording that would part the segment from what stands beside it."""
    own, last = segments[number], side == "after"
    for mark in (" ", "\n", ": ", '"'):
        parted = [*segments[:number], own, *segments[number + 1 :]]
        parted.insert(number + last, Segment("mark", mark))
        encoding, edges = _encoded_run(parted, tokenizer, inside=False)
        at = edges[number + 1]
        if not any(start < at < end for start, end in encoding.offsets):
            beside = segments[number + 1 if last else number - 1].text
            near = f"{own.text.strip()}{mark}{beside[:8]}" if last else f"{beside[-8:]}{mark}{own.text.strip()}"
            return f"write {near!r} there or choose another value"
    return "choose another value"


def _shares(segments: Sequence[Segment], tokenizer: Any, *, inside: bool) -> list[str]:
    """The share of each token in the segments' text; blanks that a tokenizer drops go with the token after them."""
    encoding, _ = _encoded_run(segments, tokenizer, inside=inside)
    text, start, texts = "".join(segment.text for segment in segments), 0, []
    for (_, own_end), (following, _) in pairwise(encoding.offsets):
        end = max(start, min(own_end, following))
        texts.append(text[start:end])
        start = end
    return [*texts, text[start:]] if encoding.ids else []


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
