"""Text to token ids as the tokenizer reads it whole, each token with its characters; control tokens only where asked.

What is encoded as plain text is encoded as `apply_chat_template(..., sanitize_control_tokens=True)` does it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvprobe.errors import AlignmentError, ConfigError, UnsupportedError

_ANCHORS = ("\n", "|", ":", "x")
Range = tuple[int, int]
"""Characters `[start, end)`."""


@dataclass(frozen=True)
class Encoding:
    """Token ids, and the characters of the text that each stands for; what a tokenizer drops belongs to none."""

    ids: tuple[int, ...] = ()
    offsets: tuple[Range, ...] = ()

    def then(self, other: Encoding, shift: int) -> Encoding:
        """This encoding and that of a text `shift` characters further on."""
        moved = tuple((start + shift, end + shift) for start, end in other.offsets)
        return Encoding(self.ids + other.ids, self.offsets + moved)


def encode_text(text: str, tokenizer: Any, asked: Sequence[Range] = (), *, inside: bool = False) -> Encoding:
    """A text without the tokens that open or close one.

    Args:
        text: all of it: pieces encoded apart are other tokens.
        tokenizer: a fast Hugging Face tokenizer.
        asked: the ranges in which control tokens such as `<|im_end|>` are meant as such; elsewhere they are text.
        inside: whether the text stands in the middle of another, so that no blank is put before it.

    Raises:
        AlignmentError: a text inside another merges with whatever stands before it.
        ConfigError: the tokenizer has no other tokens for a control token that stands in the text.
        UnsupportedError: the tokenizer does not say which characters its tokens stand for.
    """
    encoding, end = Encoding(), 0
    for start, stop in [*_meant_as_text(text, tokenizer, asked), (len(text), len(text))]:
        if text[end:start]:
            piece = _behind_anchor if inside or end else _encoded
            encoding = encoding.then(piece(text[end:start], tokenizer), end)
        if start < stop:
            ids = _as_text(text[start:stop], tokenizer)
            encoding = encoding.then(Encoding(ids, ((0, stop - start),) * len(ids)), start)
        end = stop
    return encoding


def control_tokens(text: str, tokenizer: Any) -> list[str]:
    """The control tokens that stand in a text, each once."""
    pattern = _control_pattern(tokenizer, (len(tokenizer), str(tokenizer.chat_template)))
    return [] if pattern is None else list(dict.fromkeys(pattern.findall(text)))


def opening_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that the tokenizer itself puts before every text, as a rule BOS or none."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer("a")["input_ids"]
    return tuple(next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), ()))


def _meant_as_text(text: str, tokenizer: Any, asked: Sequence[Range]) -> list[Range]:
    pattern = _control_pattern(tokenizer, (len(tokenizer), str(tokenizer.chat_template)))
    found = (match.span() for match in pattern.finditer(text)) if pattern is not None else ()
    return [(start, end) for start, end in found if not any(a <= start and end <= b for a, b in asked)]


@lru_cache(maxsize=32)
def _control_pattern(tokenizer: Any, state: tuple[int, str]) -> re.Pattern[str] | None:
    """Special tokens, and added ones that the chat template writes (`<think>`); the longest first."""
    added = tokenizer.added_tokens_decoder.values()
    named = {token.content for token in added if token.special or token.content in state[1]}
    ordered = sorted((token for token in named if token.strip()), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _encoded(text: str, tokenizer: Any) -> Encoding:
    with _untrimmed(tokenizer):
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return Encoding(tuple(found["input_ids"]), tuple(map(tuple, found["offset_mapping"])))


@contextmanager
def _untrimmed(tokenizer: Any) -> Iterator[None]:
    """Offsets with their blanks: the post-processors of byte-level tokenizers cut them off."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "post_processor"):
        raise UnsupportedError(
            f"{type(tokenizer).__name__} does not say which characters its tokens stand for; use the model's fast "
            "tokenizer (tokenizer.json)."
        )
    processor = backend.post_processor
    backend.post_processor = None
    try:
        yield
    finally:
        backend.post_processor = processor


def _behind_anchor(text: str, tokenizer: Any) -> Encoding:
    for anchor in _ANCHORS:
        prefix = _anchor_ids(tokenizer, anchor)
        found = _encoded(anchor + text, tokenizer)
        if found.ids[: len(prefix)] == prefix:
            rest = Encoding(found.ids[len(prefix) :], found.offsets[len(prefix) :])
            return Encoding().then(rest, -len(anchor))
    raise AlignmentError(f"The tokenizer merges {text[:20]!r} with whatever stands before it; begin it with a space.")


@lru_cache(maxsize=256)
def _anchor_ids(tokenizer: Any, anchor: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(anchor, add_special_tokens=False))


def _as_text(token: str, tokenizer: Any) -> tuple[int, ...]:
    anchor = _ANCHORS[0]
    before, ids = _without_added_tokens(anchor, tokenizer), _without_added_tokens(anchor + token, tokenizer)
    ids = ids[len(before) :] if ids[: len(before)] == before else _without_added_tokens(token, tokenizer)
    if tokenizer.convert_tokens_to_ids(token) in ids:
        raise ConfigError(f"The tokenizer has {token!r} as a control token alone; write the text without it.")
    return ids


def _without_added_tokens(text: str, tokenizer: Any) -> tuple[int, ...]:
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    splits = [text]
    if backend.pre_tokenizer is not None:
        splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return tuple(token.id for split in splits for token in backend.model.tokenize(split))


def is_delimiter(token_id: int, tokenizer: Any) -> bool:
    """Whether a token is only punctuation, symbols and white space (protocol 1.7)."""
    text = tokenizer.decode([token_id])
    return bool(text) and all(character.isspace() or unicodedata.category(character)[0] in "PSZC" for character in text)
