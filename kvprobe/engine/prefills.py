"""Prefills that are kept: prompts that begin alike share the cache of their beginning, and none is run twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvprobe.engine.cache import KVCache

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

# A `Forward`: its module stands above this one.
Pass = Any
Run = Callable[[Sequence[int], Any], Pass]
_KEPT_BYTES = 1 << 30
_NAME = "prefills"


@dataclass(eq=False)
class Prefills:
    """What is kept of one model's prefills.

    Attributes:
        prefixes: passes over beginnings that several prompts share; `None` until one is first needed.
        prompts: passes over whole prompts, of which the cache holds what comes after the beginning; the oldest go
            when they take more than a gigabyte.
        apart: what changes the logits of all passes now; those under something else are not taken for these.
    """

    prefixes: dict[tuple[int, ...], Pass | None] = field(default_factory=dict)
    prompts: OrderedDict[Hashable, Pass] = field(default_factory=OrderedDict)
    taken: int = 0
    apart: Hashable = None

    def prefill(self, ids: Sequence[int], run: Run) -> Pass | None:
        """The prefill of a prompt that has one of the beginnings; `None` for any other.

        Its receipt is that of the pass that was run, with the entries of the beginning as reused.
        """
        key = tuple(ids)
        prefix = max((p for p in self.prefixes if key[: len(p)] == p and len(key) > len(p)), key=len, default=None)
        if prefix is None:
            return None
        start = self.prefixes[prefix] or run(prefix, None)
        self.prefixes[prefix] = start
        name = key, self.apart
        if name in self.prompts:
            kept = self.prompts[name]
            return replace(kept, cache=KVCache.join([start.cache, kept.cache]))
        whole = run(key[len(prefix) :], start.cache)
        self._keep(key, len(prefix), whole)
        return whole

    def _keep(self, key: tuple[int, ...], start: int, whole: Pass) -> None:
        rest = whole.cache.take(torch.arange(start, len(key)))  # a slice would keep all of it
        self.prompts[key, self.apart] = replace(whole, cache=rest)
        self.taken += rest.nbytes
        while self.taken > _KEPT_BYTES:
            self.taken -= self.prompts.popitem(last=False)[1].cache.nbytes


def share_prefixes(subject: Subject, prefixes: Sequence[Sequence[int]]) -> None:
    """Have prompts that begin with one of these tokens share its cache, for as long as the subject is loaded.

    What is computed stays within the noise floor of one pass over the whole prompt.
    """
    kept = subject.kept.setdefault(_NAME, Prefills())
    for prefix in prefixes:
        if prefix:
            kept.prefixes.setdefault(tuple(prefix), None)


@contextmanager
def kept_apart(subject: Subject, what: Hashable) -> Iterator[None]:
    """Keep prefills under something that changes logits apart from all others, until the context ends."""
    kept = subject.kept.setdefault(_NAME, Prefills())
    before, kept.apart = kept.apart, what
    try:
        yield
    finally:
        kept.apart = before


def kept_prefills(subject: Subject) -> Prefills | None:
    """What is kept of the model's prefills; `None` where no prefix is shared."""
    prefills: Prefills | None = subject.kept.get(_NAME)
    return prefills
