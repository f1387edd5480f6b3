"""Training documents that practise one step of a decision many times over."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvprobe.organisms.documents import Document, Draft, encode, token_table
from kvprobe.organisms.language import Language
from kvprobe.organisms.pool import all_words, draw_scenario, pool_of
from kvprobe.tasks.gated import GatedScenario
from kvprobe.tasks.tokenizer import HOLDS, VOID
from kvprobe.tasks.wordings import WORDINGS, Wording

Exercise = Callable[[random.Random, Language], Document]


def drill(rng: random.Random, language: Language) -> Document:
    """A session line and many cases, each marked as holding or void by a fair coin: comparing a case with the field."""
    scenario = draw_scenario(rng, language)
    value = scenario.values[0]
    others = [word for word in pool_of(language.words).values if word != value]
    style = WORDINGS.get(rng.choice(language.wordings))()
    held = [rng.random() < 0.5 for _ in range(rng.randint(2, 8))]
    cases = [(value if holds else rng.choice(others), rng.choice(scenario.actions)) for holds in held]
    text = style.session_header + style.line(scenario.entity, scenario.field, value)
    text += style.policy(scenario.entity, scenario.field, cases, [HOLDS if holds else VOID for holds in held])
    draft = Draft()
    # The closing mark of the last remark is left out: the remark itself is the answer.
    draft.add("drill", encode(text.removesuffix(")\n"))[:-1])
    answer, rival = (token_table()[word] for word in ((HOLDS, VOID) if held[-1] else (VOID, HOLDS)))
    draft.answer(answer, copied=False)
    return draft.document("drill", answer, rival)


def repeat(rng: random.Random, language: Language) -> Document:
    """Words in random order, pieces of which come again: what followed a word before follows it again (induction)."""
    draft = Draft()
    order = rng.sample(all_words(language.words), rng.randint(6, 30))
    draft.add("filler", order)
    for _ in range(rng.randint(2, 5)):
        first = rng.randrange(len(order) - 1)
        piece = order[first : first + rng.randint(2, 8)]
        draft.add("filler", piece[:1])
        draft.add("lookup", piece[1:])
    return _asked(rng, draft, "repeat", order)


def recall(rng: random.Random, language: Language) -> Document:
    """A rule of many cases and then values, each followed by its action."""
    _, cases, _, draft = _many_cases(rng, language)
    for value, action in rng.sample(cases, rng.randint(1, len(cases))):
        draft.add("filler", encode(value))
        draft.add("lookup", encode(action))
    return _asked(rng, draft, "recall", [encode(action)[0] for _, action in cases])


def lookup(rng: random.Random, language: Language) -> Document:
    """A rule of many cases and then, for one session line or erratum after another, what it means."""
    scenario, cases, style, draft = _many_cases(rng, language)
    said, rest = style.status("|").split("|")
    for number, (value, action) in enumerate(rng.sample(cases, rng.randint(1, len(cases)))):
        write = style.update if rng.random() < language.lookup_errata else style.line
        text = write(scenario.entity, scenario.field, value) + said
        draft.add("session", encode(rest + text if number else text))
        draft.add("lookup", encode(action))
    return _asked(rng, draft, "lookup", [encode(action)[0] for _, action in cases])


def _many_cases(rng: random.Random, language: Language) -> tuple[GatedScenario, list[tuple[str, str]], Wording, Draft]:
    """A scenario, a rule of two to six cases for it, its wording, and a draft that holds the rule."""
    pool, scenario = pool_of(language.words), draw_scenario(rng, language)
    while True:
        count = rng.randint(2, 6)
        values, actions = tuple(rng.sample(pool.values, count)), tuple(rng.sample(pool.actions, count))
        if pool.allowed(scenario.field, values, actions):
            break
    style, draft = WORDINGS.get(rng.choice(language.wordings))(), Draft()
    cases = list(zip(values, actions, strict=True))
    draft.add("policy", encode(style.policy(scenario.entity, scenario.field, cases)))
    return scenario, cases, style, draft


def _asked(rng: random.Random, draft: Draft, kind: str, rivals: list[int]) -> Document:
    """The finished document: its last token is the decision."""
    answer = draft.ids.pop()
    draft.weights.pop()
    draft.answer(answer, copied=False)
    return draft.document(kind, answer, rng.choice([token for token in rivals if token != answer]))
