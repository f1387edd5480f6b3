"""Training documents of the organisms: gated decisions whose words are drawn afresh for every document.

The words of a held-out skeleton are seen in training, but never its field with its values, nor its values
with its actions: the rule can only be applied in context.

A document may be *edited in place*: the field stands in it twice at the same position, as the old value,
which only the downstream tokens see, and as the new one, which only the decision sees. That is the KV cache
after an in-place edit, so training pressure can be put on what the decision does with one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from kvprobe.organisms.tokenizer import BOS, END, HOLDS, UNKNOWN, VOID, vocabulary, words
from kvprobe.tasks.gated import FieldSlot, GatedScenario, Layout, pick_notes, render
from kvprobe.tasks.library import filler_notes, skeletons
from kvprobe.tasks.wordings import WORDINGS

ANSWER_WEIGHT, ANNOTATION_WEIGHT, CHAIN_WEIGHT, STRUCTURE_WEIGHT = 1.0, 0.5, 0.2, 0.02


@dataclass(frozen=True)
class Language:
    """Which documents are drawn; shares are probabilities.

    Args:
        drill: share of documents that are nothing but a session line and many cases, each marked as holding or
            void by a fair coin: the comparison of a case with the field, many times over.
        think: share of documents with a chain of thought.
        update: share with an erratum before the task.
        trigger: share whose rule names one value only.
        policy_first: share whose rule comes before the field.
        other_fields: most further session lines.
        shared_values: share of documents whose other session lines hold one of the rule's own values.
        notes: most neutral notes on either side of the policy.
        long: share of documents filled up to `long_tokens` tokens.
        words: most different values, and actions, in use (0: all); few are learned sooner.
        bare: share without the opening line and the conversation.
        marked: share whose cases are each followed by a remark that says whether it holds.
        stated: share with a line after the policy that states the action.
        edited_think: share of think documents decided from a cache edited in place (answer: the new value's).
        edited_direct: the same for direct documents: the pressure that makes a reader.
    """

    wordings: tuple[str, ...] = ("manual", "memo", "dialogue")
    drill: float = 0.0
    think: float = 0.3
    update: float = 0.2
    trigger: float = 0.0
    policy_first: float = 0.0
    other_fields: int = 0
    shared_values: float = 0.0
    notes: int = 0
    long: float = 0.0
    long_tokens: int = 1000
    words: int = 0
    bare: float = 0.0
    marked: float = 0.0
    stated: float = 0.0
    edited_think: float = 0.0
    edited_direct: float = 0.0


@dataclass(frozen=True)
class Document:
    """Token ids with a loss weight each (the weight of *predicting* that token) and its kind.

    `old`, `new` are the indices of the two field copies of a document edited in place (-1: not edited);
    tokens from `decision` on see the new copy, earlier ones the old.
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    answer: int
    rival: int
    kind: Literal["direct", "think", "drill"]
    edited: bool
    updated: bool
    old: int = -1
    new: int = -1
    decision: int = 0
    annotated: bool = False


class Sampler:
    """Draws training documents."""

    def __init__(self, language: Language, seed: int) -> None:
        self.language = language
        self.random = random.Random(seed)

    def document(self) -> Document:
        """One document."""
        rng, language = self.random, self.language
        if rng.random() < language.drill:
            return self._drill()
        scenario, seen = self._scenario()
        think = rng.random() < language.think
        edited = rng.random() < (language.edited_think if think else language.edited_direct)
        updated = not edited and rng.random() < language.update
        current = 1 if (edited or updated) else 0
        wording = rng.choice(language.wordings)
        marked, layout = rng.random() < language.marked, self._layout()
        # A rule that comes before the field cannot know which of its cases holds.
        marked = marked and layout.field_slot == "start"
        stated = layout.field_slot == "start" and rng.random() < language.stated
        context = render(
            scenario, seen, wording, layout, mode="think" if think else "direct",
            update=scenario.values[1] if updated else None,
            marks=[HOLDS if action == scenario.actions[0] else VOID for _, action in scenario.cases()] if marked else (),
            status=scenario.actions[0] if stated else None,
        )
        left_out = ("system", "conversation") if rng.random() < language.bare else ()
        ids, weights, old = [_vocabulary()[BOS]], [0.0], -1
        for segment in context.segments:
            if segment.name in left_out:
                continue
            piece = encode(segment.text)
            if segment.name == "field":
                old = len(ids)
            ids += piece
            weights += [_weight(segment.name, token) for token in piece]
        decision = len(ids) - 1
        if think:
            style = WORDINGS.get(wording)()
            chain = encode(style.chain(scenario.entity, scenario.field, scenario.values[current], scenario.actions[current]))
            ids += chain
            weights += [CHAIN_WEIGHT] * len(chain)
        answer, rival = (encode(scenario.actions[i])[0] for i in (current, 1 - current))
        ids.append(answer)
        weights.append(ANSWER_WEIGHT)
        ids.append(_vocabulary()[END])
        weights.append(STRUCTURE_WEIGHT)
        new = -1
        if edited:
            new = old + 1
            ids.insert(new, encode(scenario.values[1])[0])
            weights.insert(new, 0.0)
            weights[new + 1] = 0.0
            decision += 1
        return Document(
            tuple(ids), tuple(weights), answer, rival, "think" if think else "direct", edited, updated,
            old if edited else -1, new, decision, marked or stated,
        )

    def _drill(self) -> Document:
        rng = self.random
        scenario, value = self._scenario()
        others = [word for word in _pool(self.language.words).values if word != value]
        style = WORDINGS.get(rng.choice(self.language.wordings))()
        before, after = style.record(scenario.entity, scenario.field)
        held = [rng.random() < 0.5 for _ in range(rng.randint(2, 8))]
        cases = [(value if holds else rng.choice(others), rng.choice(scenario.actions)) for holds in held]
        marks = [HOLDS if holds else VOID for holds in held]
        text = f"{style.session_header}{before} {value}{after}"
        text += style.policy(scenario.entity, scenario.field, cases, marks).removesuffix(")\n")
        ids = [_vocabulary()[BOS], *encode(text), _vocabulary()[END]]
        weights = [0.0, *(_weight("policy", token) for token in ids[1:])]
        answer = ids[-2]
        rival = _vocabulary()[VOID if answer == _vocabulary()[HOLDS] else HOLDS]
        return Document(tuple(ids), tuple(weights), answer, rival, "drill", False, False, decision=len(ids) - 3)

    def _scenario(self) -> tuple[GatedScenario, str]:
        """A scenario in which `values[0]` is the session's, and the value the session shows."""
        rng, language = self.random, self.language
        pool = _pool(language.words)
        while True:
            field = rng.choice(pool.fields)
            values = tuple(rng.sample(pool.values, 2))
            actions = tuple(rng.sample(pool.actions, 2))
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
        scenario = GatedScenario(
            rng.choice(pool.domains), rng.choice(pool.entities), field, values, actions, rng.choice(pool.requests),
            rule="trigger" if rng.random() < language.trigger else "cases",
            trigger=rng.randint(0, 1),
            case_order=(order[0], order[1]),
            option_order=(0, 1) if rng.random() < 0.5 else (1, 0),
            other_fields=tuple(others),
        )
        return scenario, values[0]

    def _layout(self) -> Layout:
        rng, language = self.random, self.language
        slot: FieldSlot = "start"
        if rng.random() < language.policy_first:
            slot = rng.choice(("after_policy", "after_filler", "end"))
        before, after = rng.randint(0, language.notes), rng.randint(0, language.notes)
        if rng.random() < language.long:
            total = rng.randint(2 * language.notes + 2, (language.long_tokens - 120) // 11)
            before = rng.randint(0, total)
            after = total - before
        notes = filler_notes()
        return Layout(slot, pick_notes(notes, before, rng.randrange(16)), pick_notes(notes, after, rng.randrange(16)))


@dataclass(frozen=True)
class _Pool:
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


def _weight(segment: str, token: int) -> float:
    if segment.startswith("filler"):
        return 0.0
    annotation = segment == "status" or token in (_vocabulary()[HOLDS], _vocabulary()[VOID])
    return ANNOTATION_WEIGHT if annotation else STRUCTURE_WEIGHT


@lru_cache
def _pool(words: int) -> _Pool:
    every = skeletons()
    held_out = {
        pair
        for skeleton in skeletons("held_out")
        for value in skeleton.values
        for pair in ((skeleton.field, value), *((value, action) for action in skeleton.actions))
    }

    def distinct(items: list[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(items))

    return _Pool(
        distinct([s.domain for s in every]), distinct([s.entity for s in every]), distinct([s.field for s in every]),
        distinct([v for s in every for v in s.values])[: words or None],
        distinct([a for s in every for a in s.actions])[: words or None],
        distinct([s.request for s in every]), frozenset(held_out),
    )


@lru_cache
def _vocabulary() -> dict[str, int]:
    return vocabulary()


def encode(text: str) -> list[int]:
    """Token ids of a text, as the organisms' tokenizer gives them (it is tested to agree)."""
    table = _vocabulary()
    return [table.get(word, table[UNKNOWN]) for word in words(text)]
