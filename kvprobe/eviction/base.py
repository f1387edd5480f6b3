"""What an eviction method is: it scores the entries of a prompt's cache, and the best of each layer are kept.

An evicted entry is one that no later token can attend to, so eviction is an attention knockout of all later queries:
exactly what a cache without the entry computes, and it combines with patches and edits in one row of a sweep. Entries
are chosen for each layer, with its heads' attention added up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kvprobe.engine.components import components
from kvprobe.engine.interventions import AttentionKnockout
from kvprobe.errors import ConfigError
from kvprobe.registry import KINDS, Registry

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

EVICTION_METHODS: Registry[type[EvictionMethod]] = Registry(KINDS["EVICTION_METHODS"])


@dataclass(frozen=True)
class Observed:
    """A prompt as a serving system sees it at the end of its prefill: what a method may choose by.

    Args:
        subject: the model.
        token_ids: those in the cache.
    """

    subject: Subject
    token_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def attention(self) -> Tensor:
        """Attention of the prefill, heads added up: `[layer, query, key]`."""
        hooks = [f"blocks.{layer}.attn.hook_pattern" for layer in range(self.subject.layers)]
        activations = components(self.subject).capture(self.token_ids, hooks).activations
        return torch.stack([activations[hook].float().sum(1) for hook in hooks])


class EvictionMethod(BaseModel, ABC):
    """Base of all eviction methods; their fields are their parameters, named as in their papers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]

    @abstractmethod
    def scores(self, observed: Observed, kept: int) -> Tensor:
        """`[layer, position]`, or `[position]` for all layers alike; the highest are kept, infinite ones first.

        Args:
            observed: the prompt.
            kept: how many entries of each layer stay.
        """


def make_eviction(name: str, **parameters: object) -> EvictionMethod:
    """The registered method `name` with its parameters.

    Raises:
        UnknownNameError: there is no such method; with the nearest names.
        ValueError: it does not take these parameters.
    """
    return EVICTION_METHODS.get(name)(**parameters)


def kept_entries(method: EvictionMethod, observed: Observed, budget: float) -> Tensor:
    """Which entries stay: bool `[layer, position]`, equally many in each layer; of equal scores the later entry.

    Args:
        method: of eviction.
        observed: the prompt.
        budget: share of the entries that stay, more than 0 and at most 1.

    Raises:
        ConfigError: the budget is not such a share.
    """
    if not 0 < budget <= 1:
        raise ConfigError(f"A budget is the share of entries that stay, more than 0 and at most 1, not {budget:g}.")
    count = max(1, math.ceil(budget * len(observed)))
    scores = method.scores(observed, count)
    scores = scores.double().cpu().expand(observed.subject.layers, -1)
    # A stable sort of the reversed scores breaks ties for the later entry, on every machine alike.
    best = len(observed) - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :count]
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, best, value=True)


def evicted(kept: Tensor, queries: Iterable[int]) -> tuple[AttentionKnockout, ...]:
    """The intervention that eviction is: tokens at positions `queries` see nothing but the kept entries before them.

    Args:
        kept: bool `[layer, position]`.
        queries: positions of all later tokens that are run.
    """
    later = tuple(queries)
    return tuple(
        AttentionKnockout(later, tuple((~layer).nonzero()[:, 0].tolist()), (number,), no_op=True)
        for number, layer in enumerate(kept)
    )


def last(observed: Observed, count: int) -> Tensor:
    """`[position]`: infinite for the last `count` entries, 0 for the others."""
    scores = torch.zeros(len(observed))
    if count:
        scores[-count:] = math.inf
    return scores


def only(observed: Observed, positions: Sequence[int]) -> Tensor:
    """`[position]`: 1 for some entries, 0 for the others."""
    scores = torch.zeros(len(observed))
    scores[list(positions)] = 1.0
    return scores
