"""Tool calls that a model writes greedily, and what its tokenizer makes of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.engine.cache import KVCache
from kvprobe.engine.generation import generate
from kvprobe.tasks.calls import Call, locate_call
from kvprobe.tasks.context import encode_segment

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

_STEP = 12
"""Tokens generated between two looks at whether the call is complete."""


@dataclass(frozen=True)
class WrittenCall:
    """What a model wrote.

    Attributes:
        text: up to the end of the call; all of it where there is none.
        call: None where none can be read.
        censored: whether the limit came before a call or the end of the text did.
        tokens: how many were generated.
    """

    text: str
    call: Call | None
    censored: bool
    tokens: int


def write_call(subject: Subject, token_ids: Sequence[int], cache: KVCache, *, limit: int) -> WrittenCall:
    """What the model writes behind a prompt, greedily, until a call is complete.

    Args:
        subject: the model.
        token_ids: the whole prompt; its last token is run first.
        cache: its entries, with or without the last token's.
        limit: most tokens to generate.
    """
    tokenizer = subject.tokenizer
    written: list[int] = []
    text, call, stop, ended = "", None, 0, False
    while call is None and not ended and len(written) < limit:
        room = min(_STEP, limit - len(written))
        (made,) = generate(subject, (*token_ids, *written), cache, [()], limit=room)
        written += made.token_ids
        cache, ended = made.cache, not made.censored
        text = tokenizer.decode(written, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        call, stop = locate_call(text)
    return WrittenCall(text[:stop], call, call is None and not ended, len(written))


def rewritten(tokenizer: Any, call: Call) -> str:
    """A call as a tokenizer writes it: what its tokens read back as."""
    return str(
        tokenizer.decode(
            encode_segment(f" {call.text}", tokenizer), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )
