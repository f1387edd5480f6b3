"""Training documents of the organisms: gated decisions whose words are drawn afresh for every document.

The words of a held-out skeleton are seen in training, but never its field with its values, nor its values
with its actions: the rule can only be applied in context.

A document may be *edited in place*: the field stands in it twice at the same position, as the old value,
which only the downstream tokens see, and as the new one, which only the decision sees. That is the KV cache
after an in-place edit, so training pressure can be put on what the decision does with one.
"""

from __future__ import annotations

import random
from dataclasses import replace

from kvprobe.organisms import exercises
from kvprobe.organisms.documents import Document, Draft, encode
from kvprobe.organisms.language import Language
from kvprobe.organisms.pool import draw_scenario, pool_of
from kvprobe.tasks.context import Context
from kvprobe.tasks.gated import FieldSlot, GatedScenario, Layout, Mode, pick_notes, render, with_erratum
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.tokenizer import HOLDS, VOID
from kvprobe.tasks.two_fields import SecondField, render_two
from kvprobe.tasks.wordings import WORDINGS

_Erratum = tuple[str, str, str]


class Sampler:
    """Draws training documents."""

    def __init__(self, language: Language, seed: int) -> None:
        self.language = language
        self.random = random.Random(seed)

    def document(self) -> Document:
        """One document."""
        rng, language = self.random, self.language
        shares: dict[exercises.Exercise | None, float] = {
            exercises.drill: language.drill,
            exercises.repeat: language.repeat,
            exercises.recall: language.recall,
            exercises.lookup: language.lookup,
        }
        shares[None] = 1 - sum(shares.values())
        exercise = rng.choices([*shares], [*shares.values()])[0]
        if exercise is not None:
            return exercise(rng, language)
        return self._two_fields() if rng.random() < language.two_fields else self._one_field()

    def _one_field(self) -> Document:
        rng, language = self.random, self.language
        scenario, layout, wording = draw_scenario(rng, language), self._layout(), rng.choice(language.wordings)
        think = rng.random() < language.think
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
        kind = "_edited" if edited else "_updated" if update else ""
        kind += ("" if first else "_policy_first") + ("_annotated" if marked or stated else "")
        draft = self._decided(context, scenario, wording, update, current)
        if edited:
            draft.edit(encode(scenario.values[1])[0])
        return _finished(draft, ("think" if think else "direct") + kind, scenario, current)

    def _two_fields(self) -> Document:
        """Two fields with a rule each; the decision is asked about either."""
        rng, language = self.random, self.language
        scenario = replace(draw_scenario(rng, language), rule="cases")
        taken = {scenario.field, *(name for name, _ in scenario.other_fields)}
        free = draw_scenario(rng, language)
        while free.field in taken or {*free.values, *free.actions} & {*scenario.values, *scenario.actions}:
            free = draw_scenario(rng, language)
        second = SecondField(
            free.entity,
            free.field,
            free.values,
            free.actions,
            rule_first=rng.random() < 0.5,
            case_order=free.case_order,
            option_order=free.option_order,
        )
        asked_second, wording = rng.random() < 0.5, rng.choice(language.wordings)
        mode: Mode = "think" if rng.random() < language.think else "direct"
        layout = replace(self._layout(), field_slot="start")
        values = scenario.values[0], second.values[0]
        context = render_two(scenario, second, values, wording, layout, mode=mode, ask_second=asked_second)
        asked = scenario
        if asked_second:
            asked = replace(
                scenario, entity=second.entity, field=second.field, values=second.values, actions=second.actions
            )
        update, current = self._update(asked)
        draft = self._decided(context, asked, wording, update, current)
        return _finished(draft, f"{mode}_two" + ("_updated" if update else ""), asked, current)

    def _decided(
        self, context: Context, scenario: GatedScenario, wording: str, update: _Erratum | None, current: int
    ) -> Draft:
        """A draft of the whole prompt, its erratum, its chain if it thinks, and the answer under value `current`."""
        bare = self.random.random() < self.language.bare
        if update is not None:
            context = with_erratum(context, wording, *update)
        draft = Draft()
        for segment in context.segments:
            if not (bare and segment.name in ("system", "conversation")):
                draft.add(segment.name, encode(segment.text))
        style = WORDINGS.get(wording)()
        think = context.text.endswith(style.thought_cue)
        value, action = scenario.values[current], scenario.actions[current]
        if think:
            draft.think(encode(style.chain(scenario.entity, scenario.field, value, action)), value, action)
        draft.answer(encode(action)[0], copied=think)
        return draft

    def _update(self, scenario: GatedScenario) -> tuple[_Erratum | None, int]:
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
        pool = pool_of(self.language.words)
        name = rng.choice([name for name in pool.fields if name != scenario.field])
        value = rng.choice([value for value in pool.values if value not in scenario.values])
        return (scenario.entity, name, value), 0

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


def _finished(draft: Draft, kind: str, scenario: GatedScenario, current: int) -> Document:
    answer, rival = (encode(scenario.actions[i])[0] for i in (current, 1 - current))
    return draft.document(kind, answer, rival)


def _marks(scenario: GatedScenario) -> list[str]:
    return [HOLDS if action == scenario.actions[0] else VOID for _, action in scenario.cases()]
