"""Causal scrubbing of KV caches: is all that the decision reads from some entries the value of one variable?

A hypothesis is a graph. Its nodes are groups of cache entries (positions in layers); each claims that whatever reads
it needs nothing of it but the value of a variable, such as the conclusion. If that is so, a node's entries can come
from any prompt on which the variable has the same value (a donor), drawn anew for every node. A node may itself read
nodes: its entries are then recomputed on the donor's prompt after those that they read have been scrubbed in turn.

Donors are prompts of other skeletons: other domain, field, values and request. Entries are matched by slot (segment
and place beside the last mention of a value or action, and which of several such), so prompts need not be equally
long; keys are rotated from the donor's position to that of the base. An entry without counterpart stays as it is, and
`coverage` says how many do not.

The idea is that of Chan et al. 2022 (causal scrubbing); protocol 4.4, critique CI7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.operations import overwrite, recompute
from kvprobe.errors import SampleError
from kvprobe.probes.kit.aligned_positions import Slot, slots
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Wordings = Literal["same", "other"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that can be scrubbed or be a donor.

    Attributes:
        pair: turned so that this prompt is its base.
        cache: of the prompt.
    """

    pair: Pair
    cache: KVCache

    @property
    def conclusion(self) -> int:
        """Token id of the answer that is right."""
        return self.pair.base_answer_id

    @property
    def answers(self) -> frozenset[int]:
        """Token ids of both answers."""
        return frozenset((self.pair.base_answer_id, self.pair.donor_answer_id))

    @cached_property
    def places(self) -> dict[tuple[Slot, int], int]:
        """Position by slot and its number among the positions of that slot, the decision token left out."""
        seen: Counter[Slot] = Counter()
        found = {}
        for position, slot in enumerate(self._slots[:-1]):
            found[slot, seen[slot]] = position
            seen[slot] += 1
        return found

    @cached_property
    def _slots(self) -> list[Slot]:
        # "Base" and "donor" action name the same word in every prompt that shares its answers, whatever is right.
        first = min(self.answers)
        return slots(self.pair if self.pair.base_answer_id == first else self.pair.reversed())

    def matched(self, positions: Sequence[int], donor: Prompt) -> tuple[list[int], list[int]]:
        """Of `positions` those that have a counterpart in `donor`, and these counterparts, both in order."""
        wanted = set(positions)
        both = [
            (here, donor.places[key]) for key, here in self.places.items() if here in wanted and key in donor.places
        ]
        return [here for here, _ in both], [there for _, there in both]


Variable = Callable[[Prompt], Hashable]


def conclusion(prompt: Prompt) -> Hashable:
    """The variable "which answer is right"."""
    return prompt.conclusion


def nothing(prompt: Prompt) -> Hashable:
    """The variable that has one value only: any prompt between the same answers will do."""
    return prompt.answers


@dataclass(frozen=True, eq=False)
class Node:
    """A group of cache entries and the variable that is all of it that matters.

    Attributes:
        name: of the node.
        positions: of its entries in a prompt.
        variable: on which donors must agree with the prompt.
        layers: numbers; None for all.
        opposite: ask for donors that differ in the variable instead: an interchange, which ought to matter.
        reads: nodes that its entries read, scrubbed before they are recomputed; none: the donor's own entries.
    """

    name: str
    positions: Callable[[Prompt], Sequence[int]]
    variable: Variable
    layers: tuple[int, ...] | None = None
    opposite: bool = False
    reads: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False)
class Scrubbed:
    """What a scrubbed decision is run with: patches of the prompt's cache, and the share of entries they cover."""

    patches: tuple[KVPatch, ...]
    coverage: float


class DonorSampler:
    """Draws donors from a population of prompts, uniformly over those that match.

    Args:
        population: prompts that the model decides correctly.
        wordings: whether donors have the prompt's own wording or another one.
        minimum: of distinct donor skeletons that must match, else a draw would say little.
        generator: of the draws.
    """

    def __init__(
        self, population: Sequence[Prompt], wordings: Wordings, minimum: int, generator: np.random.Generator
    ) -> None:
        self.population = list(population)
        self.wordings = wordings
        self.minimum = minimum
        self.generator = generator

    def candidates(self, prompt: Prompt, node: Node) -> list[Prompt]:
        """All donors of a node: other skeleton, same answers, wording and variable as asked."""
        own, value = prompt.pair.scenario, node.variable(prompt)
        return [
            donor
            for donor in self.population
            if donor.pair.scenario.skeleton != own.skeleton
            and (donor.pair.scenario.wording == own.wording) == (self.wordings == "same")
            and donor.answers == prompt.answers
            and (node.variable(donor) == value) != node.opposite
        ]

    def distinct(self, prompt: Prompt, node: Node) -> int:
        """From how many skeletons the donors of a node come."""
        return len({donor.pair.scenario.skeleton for donor in self.candidates(prompt, node)})

    def draw(self, prompt: Prompt, node: Node) -> Prompt:
        """One donor.

        Raises:
            SampleError: too few skeletons match.
        """
        matching = self.candidates(prompt, node)
        distinct = len({donor.pair.scenario.skeleton for donor in matching})
        if distinct < self.minimum:
            raise SampleError(
                f"Only {distinct} skeletons have a donor of {self.wordings} wording for the node {node.name!r} and "
                f"{self.minimum} are asked for: add pairs, or fewer pairs of actions."
            )
        return matching[int(self.generator.integers(len(matching)))]


def scrub(subject: Subject, prompt: Prompt, nodes: Sequence[Node], sampler: DonorSampler) -> Scrubbed:
    """Resample every node that the decision reads, each from a donor of its own.

    Raises:
        SampleError: a node has too few donors.
    """
    patches, asked, covered = [], 0, 0
    for node in nodes:
        donor = sampler.draw(prompt, node)
        positions = node.positions(prompt)
        here, there = prompt.matched(positions, donor)
        asked, covered = asked + len(positions), covered + len(here)
        if not here:
            continue
        entries = moved(subject, _entries(subject, donor, node, there, sampler), there, here)
        # A donor with the same tokens up to there has the very same entries.
        patches.append(KVPatch(tuple(here), entries, node.layers, no_op=True))
    return Scrubbed(tuple(patches), covered / asked if asked else 1.0)


def _entries(subject: Subject, donor: Prompt, node: Node, positions: Sequence[int], sampler: DonorSampler) -> KVCache:
    """The donor's cache, in which the node's entries have read scrubbed ones where the node says what it reads."""
    if not node.reads:
        return donor.cache
    cache = donor.cache
    for patch in scrub(subject, donor, node.reads, sampler).patches:
        cache, _ = overwrite(cache, patch.positions, patch.donor, patch.layers, no_op=True)
    cache, _ = recompute(subject, cache, donor.pair.base.token_ids, positions)
    return cache


def moved(subject: Subject, cache: KVCache, source: Sequence[int], target: Sequence[int]) -> KVCache:
    """The entries at positions `source`, each with its key rotated to the position of the same number in `target`.

    Raises:
        UnsupportedError: a source position is missing, or the RoPE scaling does not allow moving.
    """
    part, places = cache.take(cache.index_of(source)), torch.as_tensor(target, dtype=torch.long)
    turn = places - part.source_positions
    tables = subject.architecture.rotary(subject.model)
    layers = tuple(
        LayerKV(table.rotate(layer.source_keys, turn), layer.values, layer.source_keys)
        for layer, table in zip(part.layers, tables, strict=True)
    )
    return KVCache(layers, places, part.source_positions)
