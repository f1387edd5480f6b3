"""The tasks beside the gated decision: two-hop, lookup, conversation, field position; and the extra lines."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from worded_models import TOKENIZER

from kvprobe.errors import AlignmentError
from kvprobe.models.files import cache_folder
from kvprobe.tasks.base import TASKS
from kvprobe.tasks.context import Context
from kvprobe.tasks.extra_lines import NAMES, Subjects, line_tokens
from kvprobe.tasks.field_position import FieldPosition
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import filler_notes, skeletons
from kvprobe.tasks.lookup import Lookup
from kvprobe.tasks.pairs import PromptPair, align
from kvprobe.tasks.tokenizer import vocabulary, words
from kvprobe.tasks.two_hop import TwoHop
from kvprobe.tasks.words import off_template_words

OWN = ("two_hop", "lookup", "conversation", "field_position")
POCKET = {
    name: folders[0]
    for name in ("smollm2-135m", "gemma3-270m")
    if (folders := sorted((cache_folder() / "models" / name).glob("*/tokenizer.json")))
}


def pairs_of(name: str, size: int = 60, **parameters: Any) -> list[PromptPair]:
    return list(TASKS.get(name)(size=size, **parameters).prompt_pairs())


def text_of(context: Context, segment: str) -> str:
    return next(found.text for found in context.segments if found.name == segment)


@pytest.mark.parametrize("name", OWN)
def test_all_pairs_align_with_the_organisms_tokenizer_and_no_word_is_unknown(name: str) -> None:
    for prompts in pairs_of(name):
        pair = align(prompts, TOKENIZER)
        assert TOKENIZER.unk_token_id not in (*pair.base.token_ids, *pair.donor.token_ids)
        assert {"field", "task", "cue"} <= set(pair.base.spans)
        assert len(pair.downstream) > 20 or prompts.scenario.attributes.get("slot") == "end"


@pytest.mark.parametrize("model", sorted(POCKET))
@pytest.mark.parametrize("name", OWN)
def test_most_pairs_align_with_a_pretrained_models_tokenizer(name: str, model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(POCKET[model].parent)
    chat = {} if tokenizer.chat_template else None
    aligned = 0
    for prompts in pairs_of(name):
        try:
            pair = align(prompts, tokenizer, chat=chat)
        except AlignmentError:
            continue
        aligned += 1
        decoded = tokenizer.decode(pair.base.token_ids[pair.field.start : pair.field.end])
        assert decoded.strip() == text_of(prompts.base, "field").strip()
    assert aligned >= 45


@pytest.mark.parametrize("name", OWN)
def test_pairs_are_reproducible_and_do_not_depend_on_how_many_are_asked_for(name: str) -> None:
    assert pairs_of(name, 30)[:10] == pairs_of(name, 10)
    assert pairs_of(name, 10) != pairs_of(name, 10, seed=1)


@pytest.mark.parametrize("name", ["two_hop", "lookup", "conversation"])
def test_there_are_thirty_skeletons_and_neither_answer_is_offered_first_more_often(name: str) -> None:
    pairs = pairs_of(name, 400)
    counts = Counter(pair.scenario.skeleton for pair in pairs)
    assert len(counts) >= 30
    assert max(counts.values()) - min(counts.values()) <= 1
    first = sum(f"Reply with {pair.base_answer} or" in pair.base.text for pair in pairs)
    assert 160 < first < 240


def test_a_two_hop_directory_gives_the_answers() -> None:
    """An independent reading of the text."""
    for pair in TwoHop(size=60).prompt_pairs():
        for context, answer in ((pair.base, pair.base_answer), (pair.donor, pair.donor_answer)):
            owners = dict(re.findall(r"owner of room (\w+) is the (\w+)", context.text))
            (room,) = re.findall(r"is in room (\w+)\.", context.text)
            assert owners[room] == answer
            assert len(owners) == 3
            # The answer is nowhere but in the directory and in the question.
            assert len(re.findall(rf"\b{answer}\b", context.text)) == 2


def test_a_lookup_directory_gives_the_answers_and_stands_before_the_field() -> None:
    for pair in Lookup(size=60).prompt_pairs():
        for context, answer in ((pair.base, pair.base_answer), (pair.donor, pair.donor_answer)):
            desks = dict(re.findall(r"The (\w+) is at desk (\w+)", context.text))
            (wanted,) = re.findall(r"person wants the (\w+)\.", context.text)
            assert desks[wanted] == answer
            assert len(desks) == 3
            names = [segment.name for segment in context.segments]
            assert names.index("directory") < names.index("field")


def test_a_conversation_states_rule_and_field_once_and_the_rule_decides() -> None:
    for pair in pairs_of("conversation"):
        for context, answer in ((pair.base, pair.base_answer), (pair.donor, pair.donor_answer)):
            rule = {value: action for action, value in re.findall(r"We (\w+) when the \w+ is (\w+)\.", context.text)}
            assert rule[text_of(context, "field").strip()] == answer


def test_words_of_the_tasks_are_in_the_vocabulary_and_not_in_the_filler() -> None:
    lists = off_template_words()
    every = {*lists.items, *lists.places, *lists.owners}
    assert every <= set(vocabulary())
    neutral = {word for note in filler_notes() for word in words(note)}
    # "phone" is in a note, which then mentions an item of another pair.
    assert every & neutral <= {"phone"}
    assert not set(lists.places) & set(lists.owners)


def test_field_position_crosses_all_cells_within_each_scenario() -> None:
    task = FieldPosition(size=48, field_slots=("start", "after_policy", "end"), notes=(4, 9), mentions=(0, 3))
    by_scenario: dict[str, list[PromptPair]] = {}
    for pair in task.prompt_pairs():
        by_scenario.setdefault(pair.scenario.attributes["scenario"], []).append(pair)
    for pairs in by_scenario.values():
        cells = [tuple(pair.scenario.attributes[key] for key in ("slot", "notes", "mentions")) for pair in pairs]
        assert len(set(cells)) == len(cells) == 12
        # All that may differ is the order of the segments and the neutral notes.
        for segment in ("session", "field", "session_rest", "policy", "conversation", "task", "cue"):
            assert len({text_of(pair.base, segment) for pair in pairs}) == 1
        assert len({(pair.base_answer, pair.donor_answer, pair.scenario.skeleton) for pair in pairs}) == 1


@given(notes=st.integers(0, 20), mentions=st.integers(0, 24), slot=st.sampled_from(["start", "after_policy", "end"]))
def test_notes_and_mentions_are_as_many_as_asked_for(notes: int, mentions: int, slot: str) -> None:
    task = FieldPosition(size=3, notes=(notes,), mentions=(mentions,), field_slots=(slot,))
    for pair in task.prompt_pairs():
        lines = [line for line in pair.base.text.splitlines() if line.startswith("- ")]
        field = pair.scenario.attributes["field"]
        assert len(lines) == notes
        assert sum(f" {field}" in line for line in lines) == min(mentions, notes)
        assert not any(pair.scenario.attributes["old"] in line.split() for line in lines)


def test_distance_grows_with_the_notes_and_depends_on_the_slot() -> None:
    def distance(slot: str, notes: int) -> int:
        task = FieldPosition(size=1, field_slots=(slot,), notes=(notes,), mentions=(0,))
        return len(align(next(iter(task.prompt_pairs())), TOKENIZER).downstream)

    for slot in ("start", "after_policy"):
        assert distance(slot, 12) - distance(slot, 4) > 40
    assert distance("end", 12) == distance("end", 4) < distance("start", 4)
    assert distance("after_policy", 12) < distance("start", 12)


def test_parameters_that_do_not_apply_are_refused() -> None:
    with pytest.raises(ValueError, match="notes_before"):
        FieldPosition(notes_before=(0, 3))
    with pytest.raises(ValueError, match="wordings"):
        TASKS.get("conversation")(wordings=("memo",))


class TestExtraLines:
    def said(self, pair: PromptPair) -> Subjects:
        attributes = pair.scenario.attributes
        return Subjects(pair.scenario.wording, *(attributes[key] for key in ("entity", "field", "old", "new")))

    def test_their_words_are_known_and_none_but_the_value_decides(self) -> None:
        decisive = {word for skeleton in skeletons() for word in (*skeleton.values, *skeleton.actions)}
        told = {"restatement": "new", "update": "new", "override": "new", "old_value": "old"}
        for index, pair in enumerate(GatedDecision(size=90).prompt_pairs()):
            for name in NAMES:
                ids = line_tokens(name, self.said(pair), TOKENIZER, start=index)
                line = TOKENIZER.convert_ids_to_tokens(ids)
                assert "<unk>" not in line
                values = {pair.scenario.attributes[told[name]]} if name in told else set()
                # A field may be called as an action of another scenario is, as "load".
                named = {pair.scenario.attributes["entity"], pair.scenario.attributes["field"]}
                assert (decisive & set(line)) - named == values - named
                # Each is one line of its own, so that the task block after it begins as ever.
                assert [token for token in line if token == "\n"] == (["\n"] if line else [])
                assert not line or line[-1] == "\n"

    @pytest.mark.parametrize("model", ["organism", *sorted(POCKET)])
    def test_the_neutral_line_is_as_long_as_the_override(self, model: str) -> None:
        tokenizer = TOKENIZER if model == "organism" else AutoTokenizer.from_pretrained(POCKET[model].parent)
        for index, pair in enumerate(GatedDecision(size=30).prompt_pairs()):
            lengths = {
                name: len(line_tokens(name, self.said(pair), tokenizer, start=index))
                for name in ("neutral", "override")
            }
            assert lengths["neutral"] == lengths["override"] > 8
