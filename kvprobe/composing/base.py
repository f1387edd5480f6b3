"""Putting chunks into a prompt: what a composition is, and what a reuse scheme does with each of its chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from kvprobe.composing.chunk import Chunk
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import Forward, forward
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.registry import KINDS, Registry
from kvprobe.tasks.context import Span

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

REUSE_SCHEMES: Registry[type[ReuseScheme]] = Registry(KINDS["REUSE_SCHEMES"])


@dataclass(frozen=True, eq=False)
class Part:
    """A named piece of a prompt, with a chunk where its keys and values are to be reused."""

    name: str
    token_ids: tuple[int, ...]
    chunk: Chunk | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk.token_ids != self.token_ids:
            raise ConfigError(
                f"The part {self.name!r} names other tokens than its chunk holds; make it by Part.reused(name, chunk)."
            )

    @classmethod
    def reused(cls, name: str, chunk: Chunk) -> Part:
        """A part that is a chunk."""
        return cls(name, chunk.token_ids, chunk)


@dataclass(frozen=True, eq=False)
class Composition:
    """A prompt as a list of parts, in order; the last token of the last part gives the decision.

    Raises:
        ConfigError: no part, two of one name, an empty one, or a chunk at the end.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        empty = [part.name for part in self.parts if not part.token_ids]
        if not names or empty:
            which = f"; {empty[0]!r} is empty" if empty else ""
            raise ConfigError(f"A composition needs at least one part, and parts of at least one token each{which}.")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(
                f"Two parts are called {twice[0]!r}, and a composition takes no name twice; rename one ('bos' is the "
                "part of the tokens that a tokenizer puts first)."
            )
        if self.parts[-1].chunk is not None:
            raise ConfigError(
                f"The last part {names[-1]!r} is a chunk, but the last token must be run to decide; put the task after "
                "it."
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens in order."""
        return tuple(token for part in self.parts for token in part.token_ids)

    @property
    def spans(self) -> dict[str, Span]:
        """Where each part stands, counted in tokens."""
        spans, start = {}, 0
        for part in self.parts:
            spans[part.name] = Span(start, start + len(part.token_ids))
            start += len(part.token_ids)
        return spans


@dataclass(frozen=True, eq=False)
class Placed:
    """A cache with a chunk behind what was there.

    Attributes:
        cache: what was there, untouched, then one entry for each token of the chunk.
        receipt: what placing cost.
        computed: indices in `cache` of the entries that the model computed for it.
    """

    cache: KVCache
    receipt: Receipt
    computed: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Composed:
    """A composed prompt, ready to decide.

    Attributes:
        token_ids: of the whole prompt.
        spans: where its parts stand, counted in tokens.
        cache: entries of all tokens but the last; `cache.positions` say where each stands, gaps included.
        receipt: what composing cost, from what was really run; compiling the chunks is not in it.
        computed: indices of the entries that the model computed now; all others are a chunk's, moved.
    """

    token_ids: tuple[int, ...]
    spans: dict[str, Span]
    cache: KVCache
    receipt: Receipt
    computed: tuple[int, ...] = field(default=())

    def decide(self, subject: Subject) -> Forward:
        """Run the last token: `logits` `[vocab]` of the decision."""
        return forward(subject, self.token_ids[-1:], self.cache)

    @property
    def is_contiguous(self) -> bool:
        """Whether positions are 0, 1, 2, ... as in a prefill."""
        return torch.equal(self.cache.positions, torch.arange(len(self.cache)))


class Parameters(BaseModel):
    """Base of all schemes' parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ReuseScheme(ABC):
    """Base of all schemes that reuse a chunk's keys and values: they differ in how a chunk is put behind a cache."""

    name: ClassVar[str]
    reuses: ClassVar[bool] = True
    """Whether the chunk's own entries are used at all."""
    Parameters: ClassVar[type[Parameters]] = Parameters
    parameters: Any

    def __init__(self, parameters: Any = None) -> None:
        self.parameters = parameters if parameters is not None else self.Parameters()

    @abstractmethod
    def place(self, subject: Subject, before: KVCache | None, chunk: Chunk) -> Placed:
        """`chunk` behind `before` (None for nothing); neither is written into.

        Raises:
            UnsupportedError: the RoPE scaling does not allow moving.
        """

    def compose(self, subject: Subject, composition: Composition) -> Composed:
        """The composition with every chunk reused in this scheme's way, and all else run in order.

        Raises:
            UnsupportedError: as `place`.
        """
        cache: KVCache | None = None
        receipt = Receipt()
        computed: list[int] = []
        for step in _steps(composition):
            start = 0 if cache is None else len(cache)
            if isinstance(step, Chunk):
                step.check_model(subject)
                placed = self.place(subject, cache, step)
                cache, receipt = placed.cache, receipt + placed.receipt
                computed += placed.computed
            elif step:
                result = forward(subject, step, cache)
                cache, receipt = result.cache, receipt + result.receipt
                computed += range(start, len(cache))
        if cache is None:
            raise UnsupportedError("A composition of one token has nothing to reuse; give it a chunk.")
        return Composed(composition.token_ids, composition.spans, cache, receipt, tuple(computed))


def _steps(composition: Composition) -> Iterator[Chunk | tuple[int, ...]]:
    """Chunks one by one, and what stands between them in one piece each; the decision token is left out."""
    for plain, parts in groupby(composition.parts, lambda part: part.chunk is None):
        if not plain:
            yield from (part.chunk for part in parts if part.chunk is not None)
            continue
        run = list(parts)
        ids = tuple(token for part in run for token in part.token_ids)
        yield ids[:-1] if run[-1] is composition.parts[-1] else ids


def next_position(cache: KVCache | None) -> int:
    """Where the next token stands behind `cache`."""
    return int(cache.positions.max()) + 1 if cache is not None and len(cache) else 0


def make_scheme(name: str, **parameters: Any) -> ReuseScheme:
    """The registered scheme `name` with its parameters.

    Raises:
        UnknownNameError: there is no such scheme; with the nearest names.
        ConfigError: it does not take these parameters.
    """
    kind = REUSE_SCHEMES.get(name)
    try:
        return kind(kind.Parameters(**parameters))
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"]) or "parameters"
        raise ConfigError(f"The scheme {name!r} does not take {where}={wrong['input']!r}: {wrong['msg']}.") from error


def compose(
    subject: Subject,
    composition: Composition | Sequence[Part],
    scheme: str | ReuseScheme = "splice",
    **parameters: Any,
) -> Composed:
    """A prompt composed by the scheme of that name; see `ReuseScheme.compose`.

    Raises:
        ConfigError: parameters that the scheme does not take, or beside a scheme that has its own already.
        UnknownNameError: there is no such scheme; with the nearest names.
    """
    if parameters and isinstance(scheme, ReuseScheme):
        raise ConfigError(f"The scheme {scheme.name} has its parameters already; give its name to choose others.")
    chosen = make_scheme(scheme, **parameters) if isinstance(scheme, str) else scheme
    whole = composition if isinstance(composition, Composition) else Composition(tuple(composition))
    return chosen.compose(subject, whole)
