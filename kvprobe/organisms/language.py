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

from kvprobe.organisms.tokenizer import BOS, END, HOLDS, UNKNOWN, VOID, vocabulary, words
from kvprobe.tasks.gated import FieldSlot, GatedScenario, Layout, pick_notes, render, with_erratum
from kvprobe.tasks.library import filler_notes, skeletons
from kvprobe.tasks.wordings import WORDINGS, Wording

ANSWER_WEIGHT, ANNOTATION_WEIGHT, CHAIN_WEIGHT, STRUCTURE_WEIGHT = 1.0, 0.5, 0.1, 0.02


@dataclass(frozen=True)
class Language:
    """Which documents are drawn; shares are probabilities.

    Args:
        drill: share of documents that are nothing but a session line and many cases, each marked as holding or
            void by a fair coin: the comparison of a case with the field, many times over.
        repeat: share of documents that are words in random order, pieces of which come again: what followed a word
            before follows it again (induction).
        recall: share of documents that state a rule of many cases and then name values, each followed by its action.
        lookup: share of documents that state a rule of many cases and then, for one session line or erratum after
            another, what it means: finding the case of a value that comes after the rule, many times over.
        think: share of documents with a chain of thought.
        update: share with an erratum before the task.
        update_controls: share of the errata that restate the old value or are about another field.
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
        stated_policy_first: the same for documents whose rule comes before the field.
        edited_think: share of think documents decided from a cache edited in place (answer: the new value's).
        edited_chain_action: whether such a chain is taught its action too, or only to re-read the field.
        edited_direct: the same for direct documents: the pressure that makes a reader.
    """

    wordings: tuple[str, ...] = ("manual", "memo", "dialogue")
    drill: float = 0.0
    repeat: float = 0.0
    recall: float = 0.0
    lookup: float = 0.0
    think: float = 0.3
    update: float = 0.2
    update_controls: float = 0.0
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
    stated_policy_first: float = 0.0
    edited_think: float = 0.0
    edited_chain_action: bool = True
    edited_direct: float = 0.0


@dataclass(frozen=True)
class Document:
    """Token ids with a loss weight each (the weight of *predicting* that token) and its kind.

    `answer_index` is where the decision stands: the answer, or in a chain of thought the action it names.
    `old`, `new` are the indices of the two field copies of a document edited in place (-1: not edited);
    tokens from `decision` on see the new copy, earlier ones the old.
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    kind: str
    answer: int
    rival: int
    answer_index: int
    old: int
    new: int
    decision: int


class _Draft:
    """A document while it is written."""

    def __init__(self) -> None:
        self.ids, self.weights = [_vocabulary()[BOS]], [0.0]
        self.field, self.new, self.decision, self.answer_index = -1, -1, 0, 0

    def add(self, segment: str, tokens: list[int]) -> None:
        """Append a segment of the prompt."""
        if segment == "field":
            self.field = len(self.ids)
        self.ids += tokens
        self.weights += [_weight(segment, token) for token in tokens]
        self.decision = len(self.ids) - 1

    def think(self, scenario: GatedScenario, wording: str, current: int) -> None:
        """Append a chain: its value and its action are decisions, the rest is form."""
        style = WORDINGS.get(wording)()
        value, action = scenario.values[current], scenario.actions[current]
        chain = encode(style.chain(scenario.entity, scenario.field, value, action))
        self.answer_index = len(self.ids) + len(chain) - 1 - chain[::-1].index(encode(action)[0])
        self.ids += chain
        weights = [CHAIN_WEIGHT] * len(chain)
        weights[chain.index(encode(value)[0])] = ANSWER_WEIGHT
        self.weights += weights
        self.weights[self.answer_index] = ANSWER_WEIGHT

    def answer(self, token: int, *, copied: bool) -> None:
        """Append the answer; one copied from a chain is no decision of its own."""
        if not copied:
            self.answer_index = len(self.ids)
        self.ids += [token, _vocabulary()[END]]
        self.weights += [CHAIN_WEIGHT if copied else ANSWER_WEIGHT, STRUCTURE_WEIGHT]

    def edit(self, token: int) -> None:
        """Put the new value beside the old one."""
        self.new = self.field + 1
        self.ids.insert(self.new, token)
        self.weights.insert(self.new, 0.0)
        self.weights[self.new + 1] = 0.0
        self.decision += 1
        self.answer_index += 1

    def document(self, kind: str, answer: int, rival: int) -> Document:
        """The finished document."""
        old = self.field if self.new >= 0 else -1
        return Document(
            tuple(self.ids), tuple(self.weights), kind, answer, rival, self.answer_index, old, self.new, self.decision
        )


class Sampler:
    """Draws training documents."""

    def __init__(self, language: Language, seed: int) -> None:
        self.language = language
        self.random = random.Random(seed)

    def document(self) -> Document:
        """One document."""
        rng, language = self.random, self.language
        exercises = {
            self._drill: language.drill,
            self._repeat: language.repeat,
            self._recall: language.recall,
            self._lookup: language.lookup,
        }
        exercise = rng.choices([*exercises, None], [*exercises.values(), 1 - sum(exercises.values())])[0]
        if exercise is not None:
            return exercise()
        scenario, layout, wording = self._scenario(), self._layout(), rng.choice(language.wordings)
        think, bare = rng.random() < language.think, rng.random() < language.bare
        edited = rng.random() < (language.edited_think if think else language.edited_direct)
        update, current = (None, 1) if edited else self._update(scenario)
        first = layout.field_slot == "start"
        # A rule that comes before the field cannot know which of its cases holds.
        marked = first and rng.random() < language.marked
        stated = rng.random() < (language.stated if first else language.stated_policy_first)
        context = render(
            scenario,
            scenario.values[0],
            wording,
            layout,
            mode="think" if think else "direct",
            marks=_marks(scenario) if marked else (),
            status=scenario.actions[0] if stated else None,
        )
        if update is not None:
            context = with_erratum(context, wording, *update)
        draft = _Draft()
        for segment in context.segments:
            if not (bare and segment.name in ("system", "conversation")):
                draft.add(segment.name, encode(segment.text))
        if think:
            draft.think(scenario, wording, current)
        answer, rival = (encode(scenario.actions[i])[0] for i in (current, 1 - current))
        draft.answer(answer, copied=think)
        if edited:
            draft.edit(encode(scenario.values[1])[0])
        if edited and think and not language.edited_chain_action:
            draft.weights[draft.answer_index] = 0.0
        kind = ("think" if think else "direct") + ("_edited" if edited else "_updated" if update else "")
        kind += ("" if first else "_policy_first") + ("_annotated" if marked or stated else "")
        return draft.document(kind, answer, rival)

    def _update(self, scenario: GatedScenario) -> tuple[tuple[str, str, str] | None, int]:
        """An erratum as `(entity, field, value)` and the index of the value that is right after it.

        With `update_controls` some errata restate the old value and some are about another field, so that not
        their presence but their content decides.
        """
        rng, controls = self.random, self.language.update_controls
        if rng.random() >= self.language.update:
            return None, 0
        draw = rng.random()
        if draw >= controls:
            return (scenario.entity, scenario.field, scenario.values[1]), 1
        if draw < controls / 2:
            return (scenario.entity, scenario.field, scenario.values[0]), 0
        pool = _pool(self.language.words)
        name = rng.choice([name for name in pool.fields if name != scenario.field])
        value = rng.choice([value for value in pool.values if value not in scenario.values])
        return (scenario.entity, name, value), 0

    def _drill(self) -> Document:
        rng = self.random
        scenario = self._scenario()
        value = scenario.values[0]
        others = [word for word in _pool(self.language.words).values if word != value]
        style = WORDINGS.get(rng.choice(self.language.wordings))()
        held = [rng.random() < 0.5 for _ in range(rng.randint(2, 8))]
        cases = [(value if holds else rng.choice(others), rng.choice(scenario.actions)) for holds in held]
        text = style.session_header + style.line(scenario.entity, scenario.field, value)
        text += style.policy(scenario.entity, scenario.field, cases, [HOLDS if holds else VOID for holds in held])
        draft = _Draft()
        # The closing mark of the last remark is left out: the remark itself is the answer.
        draft.add("drill", encode(text.removesuffix(")\n"))[:-1])
        answer, rival = (_vocabulary()[word] for word in ((HOLDS, VOID) if held[-1] else (VOID, HOLDS)))
        draft.answer(answer, copied=False)
        return draft.document("drill", answer, rival)

    def _repeat(self) -> Document:
        rng, draft = self.random, _Draft()
        order = rng.sample(_words(self.language.words), rng.randint(6, 30))
        draft.add("filler", order)
        for _ in range(rng.randint(2, 5)):
            first = rng.randrange(len(order) - 1)
            piece = order[first : first + rng.randint(2, 8)]
            draft.add("filler", piece[:1])
            draft.add("lookup", piece[1:])
        return self._asked(draft, "repeat", order)

    def _recall(self) -> Document:
        _, cases, _, draft = self._many_cases()
        for value, action in self.random.sample(cases, self.random.randint(1, len(cases))):
            draft.add("filler", encode(value))
            draft.add("lookup", encode(action))
        return self._asked(draft, "recall", [encode(action)[0] for _, action in cases])

    def _lookup(self) -> Document:
        scenario, cases, style, draft = self._many_cases()
        said, rest = style.status("|").split("|")
        for number, (value, action) in enumerate(self.random.sample(cases, self.random.randint(1, len(cases)))):
            write = style.update if self.random.random() < 0.5 else style.line
            text = write(scenario.entity, scenario.field, value) + said
            draft.add("session", encode(rest + text if number else text))
            draft.add("lookup", encode(action))
        return self._asked(draft, "lookup", [encode(action)[0] for _, action in cases])

    def _many_cases(self) -> tuple[GatedScenario, list[tuple[str, str]], Wording, _Draft]:
        """A scenario, a rule of two to six cases for it, its wording, and a draft that holds the rule."""
        rng, pool, scenario = self.random, _pool(self.language.words), self._scenario()
        while True:
            count = rng.randint(2, 6)
            values, actions = tuple(rng.sample(pool.values, count)), tuple(rng.sample(pool.actions, count))
            if pool.allowed(scenario.field, values, actions):
                break
        style, draft = WORDINGS.get(rng.choice(self.language.wordings))(), _Draft()
        cases = list(zip(values, actions, strict=True))
        draft.add("policy", encode(style.policy(scenario.entity, scenario.field, cases)))
        return scenario, cases, style, draft

    def _asked(self, draft: _Draft, kind: str, rivals: list[int]) -> Document:
        """The finished document of an exercise: its last token is the decision."""
        answer = draft.ids.pop()
        draft.weights.pop()
        draft.answer(answer, copied=False)
        return draft.document(kind, answer, self.random.choice([token for token in rivals if token != answer]))

    def _scenario(self) -> GatedScenario:
        """A scenario in which the session holds `values[0]`."""
        rng, language = self.random, self.language
        pool = _pool(language.words)
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


@lru_cache
def _words(count: int) -> list[int]:
    pool = _pool(count)
    return list({encode(word)[0]: None for word in (*pool.values, *pool.actions, *pool.fields, *pool.entities)})


def _marks(scenario: GatedScenario) -> list[str]:
    return [HOLDS if action == scenario.actions[0] else VOID for _, action in scenario.cases()]


def _weight(segment: str, token: int) -> float:
    if segment.startswith("filler"):
        return 0.0
    if segment == "lookup":
        return ANSWER_WEIGHT
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
        distinct([s.domain for s in every]),
        distinct([s.entity for s in every]),
        distinct([s.field for s in every]),
        distinct([v for s in every for v in s.values])[: words or None],
        distinct([a for s in every for a in s.actions])[: words or None],
        distinct([s.request for s in every]),
        frozenset(held_out),
    )


@lru_cache
def _vocabulary() -> dict[str, int]:
    return vocabulary()


def encode(text: str) -> list[int]:
    """Token ids of a text, as the organisms' tokenizer gives them (it is tested to agree)."""
    table = _vocabulary()
    return [table.get(word, table[UNKNOWN]) for word in words(text)]
