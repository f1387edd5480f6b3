"""Compiling a chunk of text: its keys and values, computed once, to be put anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import prefill
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.library import filler_notes

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Header = Literal["none", "bos", "neutral", "real"]
"""What a chunk is compiled behind.

`none`: nothing, so that its own first token becomes the attention sink (critique CO1). `bos`: the tokenizer's token for
the beginning of a text. `neutral`: that token, if there is one, and a sentence that says nothing. `real`: what stands
before the chunk in the very prompt it is compiled for, an upper bound.
"""


@dataclass(frozen=True, eq=False)
class Chunk:
    """A piece of text with its keys and values.

    Attributes:
        token_ids: of the chunk alone, at least one.
        cache: its entries alone, `[1, kv_head, position, head_dim]`, at the positions they were computed at.
        header: what it was compiled behind.
        header_tokens: how many tokens that was; their entries are not kept.
        receipt: what compiling it cost.
        model_sha256: fingerprint of the model that compiled it, which alone may use it; empty where that is not known.
    """

    token_ids: tuple[int, ...]
    cache: KVCache
    header: Header = "none"
    header_tokens: int = 0
    receipt: Receipt = field(default_factory=Receipt)
    model_sha256: str = ""

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.cache):
            raise UnsupportedError(
                f"A chunk of {len(self.token_ids)} tokens cannot have a cache of {len(self.cache)} entries; both must "
                "be the same and at least one."
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    def check_model(self, subject: Subject) -> None:
        """Refuse a model other than the one that compiled the chunk.

        Raises:
            UnsupportedError: it is another one.
        """
        if self.model_sha256 not in ("", subject.identity.fingerprint):
            raise UnsupportedError(
                f"The chunk was compiled by a model of other weights, configuration or dtype than {subject.name}; "
                f"compile the text again with {subject.name}."
            )


def precompile(
    subject: Subject, segment: str | Sequence[int], header: Header = "bos", *, before: Sequence[int] = ()
) -> Chunk:
    """Compute a chunk's keys and values once.

    Args:
        subject: the model.
        segment: the text, encoded as in the middle of a text, or its token ids.
        header: what to compile it behind.
        before: for `real`, the token ids that stand before it.

    Raises:
        ConfigError: an empty segment, an unknown header, or `before` missing or given in vain.
        UnsupportedError: `bos` with a tokenizer that has no such token.
    """
    ids = tuple(encode_segment(segment, subject.tokenizer)) if isinstance(segment, str) else tuple(segment)
    if not ids:
        raise ConfigError("There is nothing to compile: the segment is empty; give at least one token.")
    _check_tokens(subject, ids)
    head = header_ids(subject, header, before)
    result = prefill(subject, (*head, *ids))
    entries = result.cache.take(slice(len(head), None))
    return Chunk(ids, entries, header, len(head), result.receipt, subject.identity.fingerprint)


def compile_behind(subject: Subject, ids: Sequence[int], header: Header, before: Sequence[int]) -> Chunk:
    """A chunk for a place with the tokens `before` ahead of it, which only the header `real` uses.

    At the very start of a prompt nothing stands before it, so being compiled alone is being compiled there.
    """
    if header == "real":
        return precompile(subject, ids, "real" if before else "none", before=before)
    return precompile(subject, ids, header)


def header_ids(subject: Subject, header: Header, before: Sequence[int] = ()) -> tuple[int, ...]:
    """The tokens that a chunk is compiled behind; see `precompile`."""
    if header not in get_args(Header):
        raise ConfigError(f"There is no header {header!r}; known: {', '.join(get_args(Header))}.")
    if (header == "real") != bool(before):
        raise ConfigError(
            "The header 'real' needs the tokens that stand before the chunk, and only it takes any; pass them as "
            "`before`, or choose another header."
        )
    if header == "none":
        return ()
    if header == "real":
        return tuple(before)
    start = beginning_of_text(subject.tokenizer)
    if header == "bos":
        if not start:
            raise UnsupportedError(
                f"The tokenizer of {subject.name} has no token for the beginning of a text; compile with the header "
                "'neutral' instead."
            )
        return start
    return (*start, *encode_segment(f"{filler_notes()[0]}\n", subject.tokenizer))


def _check_tokens(subject: Subject, ids: Sequence[int]) -> None:
    """Refuse what is no token of the model, and words that its tokenizer does not know."""
    size = int(subject.model.get_input_embeddings().num_embeddings)
    wrong = [token for token in ids if not isinstance(token, int) or not 0 <= token < size]
    if wrong:
        raise ConfigError(
            f"{wrong[0]!r} is no token id of {subject.name}; they are whole numbers from 0 to {size - 1}."
        )
    unknown = getattr(subject.tokenizer, "unk_token_id", None)
    if unknown is not None and unknown in ids:
        raise ConfigError(
            f"The text to compile holds a word that {subject.name} does not know; use words of its vocabulary."
        )


def beginning_of_text(tokenizer: Any) -> tuple[int, ...]:
    """The token that the tokenizer knows as beginning a text; none if it has no such token."""
    return () if tokenizer.bos_token_id is None else (int(tokenizer.bos_token_id),)
