"""Answers in the place where they stand: how each is spelled behind a prompt, and the tokens of these spellings."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from kvprobe.errors import AlignmentError
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.encoding import encode_text

_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "FULLWIDTH")
"""First words of the Unicode names of characters before which a text has no blank."""
_TAIL = 8
"""Tokens before an answer that decide how it is cut."""


def blank_before(answer: str, before: str) -> str:
    """What a text that ends in `before` has in front of an answer: a blank, or nothing.

    Nothing behind white space, an opening bracket or quote, and in scripts that put no blanks between words.
    """
    if not before or before[-1].isspace() or _unspaced(answer[:1]) or _unspaced(before[-1]):
        return ""
    return "" if unicodedata.category(before[-1]) in ("Ps", "Pi") or before[-1] in "\"'`" else " "


def spellings(answer: str, prompt_ids: Sequence[int], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Tokens of an answer as it may follow a prompt: as `blank_before` has it first, then with or without the blank.

    Each is cut as part of the text that it ends. Behind white space there is no further blank.

    Args:
        answer: a word or more.
        prompt_ids: the tokens of the prompt.
        tokenizer: a fast Hugging Face tokenizer.
    """
    tail = list(prompt_ids[-_TAIL:])
    before = tokenizer.decode(tail, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    blank = blank_before(answer, before)
    ways = [blank, "" if blank else " "] if before and not before[-1].isspace() else [blank]
    first, *others = (_behind(before, way + answer, tokenizer) for way in ways)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return tuple(dict.fromkeys(ids for ids in (first, *others) if ids and (ids == first or unknown not in ids)))


def answer_token(word: str, rivals: Iterable[str], prompt_ids: Sequence[int], tokenizer: Any) -> int:
    """The single token that stands for answer `word` behind a prompt.

    Raises:
        AlignmentError: the word is several tokens, or begins with the same token as a rival.
    """
    ids = spellings(word, prompt_ids, tokenizer)[0]
    if len(ids) != 1:
        pieces = tokenizer.convert_ids_to_tokens(ids)
        raise AlignmentError(f"The answer {word!r} is {len(ids)} tokens ({pieces}); choose a single-token word.")
    for rival in rivals:
        if spellings(rival, prompt_ids, tokenizer)[0][0] == ids[0]:
            raise AlignmentError(f"The answers {word!r} and {rival!r} begin with the same token; choose others.")
    return ids[0]


def _behind(before: str, text: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens of `text` behind `before`; those of the text alone where the two would share one."""
    encoding = encode_text(before + text, tokenizer, inside=True) if before else None
    if encoding is not None and not any(start < len(before) < end for start, end in encoding.offsets):
        return tuple(token for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True) if end > len(before))
    return tuple(encode_segment(text, tokenizer))


def _unspaced(character: str) -> bool:
    return bool(character) and unicodedata.name(character, "").split(" ")[0] in _UNSPACED
