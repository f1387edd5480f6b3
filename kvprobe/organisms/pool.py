"""Words that training documents draw from, and what is held out of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from kvprobe.organisms.documents import encode
from kvprobe.organisms.language import Language
from kvprobe.tasks.gated import GatedScenario
from kvprobe.tasks.library import skeletons


@dataclass(frozen=True)
class Pool:
    """Words to draw from, and the combinations that are held out."""

    domains: tuple[str, ...]
    entities: tuple[str, ...]
    fields: tuple[str, ...]
    values: tuple[str, ...]
    actions: tuple[str, ...]
    requests: tuple[str, ...]
    held_out: frozenset[tuple[str, str]]

    def allowed(self, field: str, values: tuple[str, ...], actions: tuple[str, ...]) -> bool:
        """Whether no held-out field-value or value-action combination occurs."""
        return not any(
            (field, value) in self.held_out or any((value, action) in self.held_out for action in actions)
            for value in values
        )


def draw_scenario(rng: random.Random, language: Language) -> GatedScenario:
    """A scenario in which the session holds `values[0]`."""
    pool = pool_of(language.words)
    while True:
        field = rng.choice(pool.fields)
        old, new = rng.sample(pool.values, 2)
        first, second = rng.sample(pool.actions, 2)
        values, actions = (old, new), (first, second)
        if pool.allowed(field, values, actions):
            break
    others = []
    for name in rng.sample(pool.fields, rng.randint(0, language.other_fields)):
        if name != field:
            shared = rng.random() < language.shared_values
            value = rng.choice(values if shared else pool.values)
            if shared or value not in values:
                others.append((name, value))
    order = rng.sample((0, 1), 2)
    return GatedScenario(
        rng.choice(pool.domains),
        rng.choice(pool.entities),
        field,
        values,
        actions,
        rng.choice(pool.requests),
        rule="trigger" if rng.random() < language.trigger else "cases",
        trigger=rng.randint(0, 1),
        case_order=(order[0], order[1]),
        option_order=(0, 1) if rng.random() < 0.5 else (1, 0),
        other_fields=tuple(others),
    )


@lru_cache
def all_words(count: int) -> list[int]:
    """Token ids of the words of rules and sessions, of `count` values and actions (0: all)."""
    pool = pool_of(count)
    return list({encode(word)[0]: None for word in (*pool.values, *pool.actions, *pool.fields, *pool.entities)})


@lru_cache
def pool_of(words: int) -> Pool:
    """The pool with so many values, and actions, in use (0: all)."""
    every = skeletons()
    held_out = {
        pair
        for skeleton in skeletons("held_out")
        for value in skeleton.values
        for pair in ((skeleton.field, value), *((value, action) for action in skeleton.actions))
    }

    def distinct(items: list[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(items))

    return Pool(
        distinct([s.domain for s in every]),
        distinct([s.entity for s in every]),
        distinct([s.field for s in every]),
        distinct([v for s in every for v in s.values])[: words or None],
        distinct([a for s in every for a in s.actions])[: words or None],
        distinct([s.request for s in every]),
        frozenset(held_out),
    )
