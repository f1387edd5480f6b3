"""Editable contexts: state, what the prompt says and what the cache holds, against plain Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache
from worded_models import TOKENIZER, plain_logits, worded

from kvprobe.edit import texts
from kvprobe.edit.base import EDIT_METHODS
from kvprobe.edit.context import EditableContext, Field
from kvprobe.edit.erratum import erratum_name
from kvprobe.edit.meter import Meter
from kvprobe.errors import AlignmentError, ConfigError, KvprobeError, UnsupportedError
from kvprobe.models.catalogue import organism_names
from kvprobe.models.loader import load_subject
from kvprobe.models.subject import Subject
from kvprobe.probes.kit.edit_cases import field_edit
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, align
from kvprobe.tasks.two_fields import TwoFields

ANSWERS = ["cancel", "deny"]
FIRST, SECOND = "order status", "account role"
# The value stands in the text before and after the field too: only spans can tell them apart.
PARTS = [
    "You work at the pending desk.\norder status: ",
    Field(FIRST, "pending"),
    "\naccount role: ",
    Field(SECOND, "admin", erratum="Update: the role is {value}.\n"),
    "\nIf the order status is pending, then cancel.\nIf the account role is guest, then deny.\n",
    ("task", "Task: decide by the status.\nReply with cancel or deny.\n"),
    ("cue", "Answer:"),
]
VALUES = {FIRST: ("pending", "shipped", "shipped or returned"), SECOND: ("admin", "guest", "guest of the desk")}
WHOLE = ("full_downstream", "full_reprefill", "erratum", "hoist_to_end")
"""Methods that leave nothing stale behind: after them the cache is a prefill of what the prompt says."""
# Read through a bridge that tiny models of every kind do not have.
NEEDS_ATTENTION = {"selective", "oracle_copy"}
EXACT = 1e-5
EDITS = st.lists(st.tuples(st.sampled_from(sorted(VALUES)), st.integers(0, 2)), min_size=1, max_size=5)


@cache
def start(family: str = "qwen3") -> EditableContext:
    return EditableContext.prefill(worded(family), PARTS)


def fresh(family: str = "qwen3") -> EditableContext:
    return start(family).copy()


def next_logits(context: EditableContext) -> torch.Tensor:
    return context.prompt.decide(worded_of(context)).logits.double()


def worded_of(context: EditableContext) -> Subject:
    return context._subject


def written_out(state: dict[str, str]) -> tuple[int, ...]:
    """Tokens of the prompt as it would be written with these values from the start."""
    parts = [replace(part, value=state[part.name]) if isinstance(part, Field) else part for part in PARTS]
    return EditableContext.tokenized(worded("qwen3"), parts)[0].token_ids


def exactly(found: torch.Tensor, ought: torch.Tensor) -> None:
    torch.testing.assert_close(found, ought, atol=EXACT, rtol=0)


@settings(max_examples=10)
@given(edits=EDITS, family=st.sampled_from(["qwen3", "llama", "mistral", "gemma2"]))
def test_full_downstream_edits_in_any_order_are_a_plain_prefill_of_the_current_state(
    edits: list[tuple[str, int]], family: str
) -> None:
    context = fresh(family)
    for field, number in edits:
        context.set(field, VALUES[field][number])
    assert context.token_ids == written_out(dict(context.state))
    exactly(next_logits(context), plain_logits(worded(family).model, context.token_ids))
    assert dict(context.written) == dict(context.state)


@settings(max_examples=10)
@given(edits=EDITS, data=st.data())
def test_methods_that_leave_nothing_stale_hold_a_plain_prefill_of_what_the_prompt_says(
    edits: list[tuple[str, int]], data: st.DataObject
) -> None:
    context, state = fresh(), {FIRST: "pending", SECOND: "admin"}
    for field, number in edits:
        method = data.draw(st.sampled_from(WHOLE))
        before = context.prompt
        mark, cost = before.cache.fingerprint(), context.set(field, VALUES[field][number], method)
        state[field] = VALUES[field][number]
        assert dict(context.state) == state
        assert before.cache.fingerprint() == mark
        assert cost.prompt_tokens == len(context.token_ids)
        exactly(next_logits(context), plain_logits(worded("qwen3").model, context.token_ids))
        assert (field in context.errata) == (method == "erratum")
        for name, line in context.errata.items():
            assert f" {state[name]} ;" in line or f" {state[name]} ." in line
        for name, value in context.written.items():
            span = context.prompt.span(name)
            assert TOKENIZER.decode(context.token_ids[span.start : span.end]) == value


@pytest.mark.parametrize("method", sorted(set(EDIT_METHODS.names()) - NEEDS_ATTENTION))
@settings(max_examples=6)
@given(edits=EDITS)
def test_state_is_current_under_every_method(method: str, edits: list[tuple[str, int]]) -> None:
    context, state = fresh(), {FIRST: "pending", SECOND: "admin"}
    for field, number in edits:
        state[field] = VALUES[field][number]
        with Meter(worded("qwen3")) as meter:
            cost = context.set(field, state[field], method)
        assert cost.tokens == pytest.approx(meter.tokens, abs=1)
        assert dict(context.state) == state
        rewrites = method not in {"stale", "erratum"}
        assert context.written[field] == (state[field] if rewrites else VALUES[field][0])
        assert list(context.errata) == [name for name in context.errata if "erratum" in method]


def test_an_edit_takes_the_old_news_of_its_field_out_and_no_other() -> None:
    for method in ("full_downstream", "field_only", "full_reprefill"):
        context = fresh()
        context.set(SECOND, "guest", "erratum")
        context.set(FIRST, "shipped", "erratum")
        context.set(FIRST, "shipped or returned", method)
        assert list(context.errata) == [SECOND]
        without = fresh()
        without.set(SECOND, "guest", "erratum")
        without.set(FIRST, "shipped or returned", method)
        assert context.token_ids == without.token_ids
        if method != "field_only":
            exactly(next_logits(context), next_logits(without))


def test_a_partial_edit_runs_anew_what_had_read_the_old_news() -> None:
    """The other field's entries keep their notes, and the task knows nothing of the erratum that was taken out."""
    context, without = fresh(), fresh()
    context.set(FIRST, "shipped", "erratum")
    context.set(FIRST, "shipped", "field_only")
    without.set(FIRST, "shipped", "field_only")
    place = without.prompt.span("task").start
    again = without.with_segment("task", PARTS[5][1])
    assert again.token_ids == context.token_ids
    exactly(next_logits(context), next_logits(again))
    for mine, theirs in zip(context.prompt.cache.layers, without.prompt.cache.layers, strict=True):
        assert torch.equal(mine.keys[:, :, :place], theirs.keys[:, :, :place])


def test_taking_out_an_erratum_costs_a_full_downstream_edit_nothing() -> None:
    context, without = fresh(), fresh()
    context.set(FIRST, "shipped", "erratum")
    assert context.set(FIRST, "pending").tokens == without.set(FIRST, "pending").tokens
    stayed = context.copy()
    stayed.set(FIRST, "shipped", "erratum")
    before = stayed.prompt
    assert stayed.set(FIRST, "pending", "stale").tokens == 0
    assert stayed.prompt.token_ids == before.token_ids
    assert stayed.state[FIRST] == "pending"
    assert "shipped" in stayed.errata[FIRST]


def test_a_hoisted_field_gets_its_erratum_behind_it() -> None:
    context = fresh()
    context.set(FIRST, "shipped", "hoist_to_end")
    context.set(SECOND, "guest", "erratum")
    context.set(FIRST, "pending", "erratum")
    assert context.text.endswith(
        "Update : the role is guest . \n Task : decide by the status . \n Reply with cancel or deny . \n"
        " order status : shipped \n"
        " Update : the order status is now pending ; this replaces the earlier one . \n Answer :"
    )
    spans = context.prompt.spans
    assert spans[erratum_name(FIRST)].end == spans["cue"].start
    assert context.written[FIRST] == "shipped"


def test_the_seam_measures_what_an_edit_left_stale() -> None:
    context = fresh()
    for value in ("shipped or returned", "pending"):
        context.set(FIRST, value)
        assert max(map(abs, context.seam(ANSWERS).shifts.values())) < EXACT
    context.set(FIRST, "shipped or returned", "field_only")
    seam = context.seam(ANSWERS)
    full = plain_logits(worded("qwen3").model, written_out(dict(context.state))).log_softmax(-1)
    mine = next_logits(context).log_softmax(-1)
    for answer, shift in seam.shifts.items():
        token = TOKENIZER.encode(answer, add_special_tokens=False)[0]
        assert shift == pytest.approx(float(mine[token] - full[token]), abs=EXACT)
    assert seam.total_variation == pytest.approx(float((mine.exp() - full.exp()).abs().sum()) / 2, abs=EXACT)
    assert seam.total_variation > 1e-4
    assert seam.same_answer == (seam.edited.answer == seam.reprefilled.answer)
    context.set(FIRST, "shipped", "erratum")
    context.set(FIRST, "pending", "full_reprefill")
    context.set(FIRST, "shipped", "erratum")
    assert context.seam(ANSWERS, "text").total_variation < EXACT < context.seam(ANSWERS).total_variation


def test_decisions_are_of_whole_answers() -> None:
    context, model = fresh("llama"), worded("llama").model
    decision = context.decide(["cancel", "deny the order"])
    for answer, found in decision.log_probabilities.items():
        ids, ought = list(context.token_ids), 0.0
        for token in TOKENIZER.encode(answer, add_special_tokens=False):
            ought += float(plain_logits(model, ids).log_softmax(-1)[token])
            ids.append(token)
        assert found == pytest.approx(ought, abs=EXACT)
        assert decision.probabilities[answer] == pytest.approx(float(torch.tensor(ought).exp()), abs=EXACT)
    best, worst = sorted(decision.log_probabilities, key=decision.log_probabilities.__getitem__, reverse=True)
    assert decision.answer == best
    assert decision.margin == decision.log_probabilities[best] - decision.log_probabilities[worst]
    assert TOKENIZER.encode(decision.next_token, add_special_tokens=False) == [int(next_logits(context).argmax())]


@pytest.mark.parametrize(
    "answers", [["cancel"], ["cancel", "cancel"], ["cancel", "cancel the order"], "cancel", ["", "a"]]
)
def test_answers_that_cannot_be_told_apart_are_refused(answers: Any) -> None:
    with pytest.raises(ConfigError, match=r"at least two|begin alike"):
        fresh().decide(answers)


def test_another_question_on_the_same_context() -> None:
    context = fresh()
    context.set(FIRST, "shipped", "erratum")
    other = context.with_segment("task", "Task: decide by the role.\n")
    exactly(next_logits(other), plain_logits(worded("qwen3").model, other.token_ids))
    assert "decide by the role" in other.text
    assert "decide by the status" in context.text
    other.set(FIRST, "pending")
    assert context.state[FIRST] == "shipped"
    assert other.seam(ANSWERS).total_variation < EXACT
    with pytest.raises(ConfigError, match="belongs to the line of a field"):
        context.with_segment(f"before {FIRST}", "status: ")
    with pytest.raises(ConfigError, match="no segment 'nothing'"):
        context.with_segment("nothing", "text")


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "mistral", "gemma2", "gemma3", "deepseek_v2", "qwen2_5_vl", "qwen3_vl"]
)
def test_hugging_face_goes_on_from_an_edited_context(family: str) -> None:
    subject, context = worded(family), fresh(family)
    context.set(SECOND, "guest of the desk")
    context.set(FIRST, "shipped", "erratum")
    mark = context.prompt.cache.fingerprint()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": TOKENIZER.pad_token_id}
    if subject.architecture.auto_class == "AutoModelForImageTextToText":
        # As a call with an image leaves it.
        subject.model.model.rope_deltas = torch.tensor([[-9]])
    made = subject.model.generate(**context.to_hugging_face(), **options)
    ids = torch.tensor([context.token_ids])
    plain = subject.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(made, plain)
    assert context.prompt.cache.fingerprint() == mark
    written = context.generate(6)
    assert written.token_ids == tuple(plain[0, len(context.token_ids) :].tolist())
    taken = context.to_hugging_face()["past_key_values"]
    for layer in taken.layers:
        layer.keys.zero_()
    assert context.prompt.cache.fingerprint() == mark


def hugging_face_cache(subject: Subject, ids: Sequence[int]) -> DynamicCache:
    past = DynamicCache()
    with torch.no_grad():
        subject.model(torch.tensor([ids]), past_key_values=past, use_cache=True)
    return past


@pytest.mark.parametrize("kept", [0, 1])
def test_a_hugging_face_cache_becomes_a_context_of_its_own(kept: int) -> None:
    subject = worded("llama")
    ids = fresh("llama").token_ids
    past = hugging_face_cache(subject, ids[: len(ids) - 1 + kept])
    context = EditableContext.from_hugging_face(subject, PARTS, past)
    for layer in past.layers:
        layer.values.zero_()
    exactly(next_logits(context), plain_logits(subject.model, ids))
    context.set(FIRST, "shipped or returned")
    exactly(next_logits(context), plain_logits(subject.model, written_out(dict(context.state))))


def test_a_cache_of_something_else_is_refused() -> None:
    subject, ids = worded("llama"), list(fresh("llama").token_ids)
    swapped = [*ids[:5], ids[6], ids[5], *ids[7:]]
    for wrong, said in (
        (swapped, "position 5 is another token's"),
        (ids[:-2], "prompt has"),
        ([*ids, 5], "prompt has"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            EditableContext.from_hugging_face(subject, PARTS, hugging_face_cache(subject, wrong))
    other = hugging_face_cache(worded("wide_heads"), ids)
    with pytest.raises(UnsupportedError, match="another model's"):
        EditableContext.from_hugging_face(subject, PARTS, other)
    with pytest.raises(UnsupportedError, match="another token's"):
        EditableContext.from_hugging_face(subject, PARTS, hugging_face_cache(worded("qwen3"), ids))


@pytest.mark.parametrize(
    ("field", "value", "method", "said"),
    [
        ("status", "shipped", "erratum", "no field 'status'; it has order status, account role"),
        (FIRST, "", "erratum", "empty"),
        (FIRST, " shipped", "full_downstream", "blanks around"),
        (FIRST, "shipped", "eratum", "did you mean 'erratum'"),
        (FIRST, "shipped", "hoist_to_end", "no segment 'nowhere'"),
        (FIRST, "shipped", "selective", "does not take"),
    ],
)
def test_an_edit_that_fails_leaves_the_context_as_it_was(field: str, value: str, method: str, said: str) -> None:
    context = fresh()
    context.set(SECOND, "guest", "erratum")
    before, state = context.prompt, dict(context.state)
    parameters = {"hoist_to_end": {"before": "nowhere"}, "selective": {"criterium": "suffix"}}.get(method, {})
    with pytest.raises(KvprobeError, match=said):
        context.set(field, value, method, **parameters)
    assert context.prompt is before
    assert dict(context.state) == state


@cache
def merging() -> Subject:
    """A subject whose tokenizer joins "b" with a "c" behind it, and "a" with a "b"."""
    letters = ["<bos>", "\n", " ", *"abcdx", "bc", "ab"]
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [("b", "c"), ("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    return replace(worded("qwen3"), tokenizer=tokenizer)


def test_values_whose_tokens_merge_with_the_text_beside_them_are_refused() -> None:
    context = EditableContext.prefill(merging(), ["x\na ", Field("f", "d"), "c\n", ("cue", "x x")])
    assert context.prompt.spans["f"] == type(context.prompt.spans["f"])(3, 5)
    with pytest.raises(AlignmentError, match=r"joins 'b' of 'f' with what stands after it: 'bc' .* write 'b c"):
        context.set("f", "b")
    assert context.state["f"] == "d"
    context.set("f", "ab d")
    assert context.written["f"] == "ab d"
    with pytest.raises(AlignmentError, match="stands before it"):
        EditableContext.prefill(merging(), ["x\na", Field("f", "b"), " c\n", ("cue", "x x")])


def test_lines_are_taken_from_the_texts_beside_a_field() -> None:
    said = "Session\norder status: pending, account role: admin\nTask\nAnswer:"
    shared: list[Any] = [
        "Session\norder status: ",
        Field("a", "pending"),
        ", account role: ",
        Field("b", "admin"),
        "\n",
        ("task", "Task\n"),
        ("cue", "Answer:"),
    ]
    context = EditableContext.prefill(worded("qwen3"), shared)
    assert context.text == TOKENIZER.decode(TOKENIZER.encode(said))
    for name, value in (("a", "shipped"), ("b", "guest")):
        with pytest.raises(UnsupportedError, match="shares its line with other text"):
            context.set(name, value, "hoist_to_end")
    context.set("b", "guest", "erratum")
    assert context.errata["b"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["a", "b"], "declares no field"),
        (["a ", Field("f", "pending")], "ends in field 'f'"),
        (["a ", Field("f", "pending"), Field("g", "admin"), "\n", "Answer:"], "Nothing stands between"),
        (["a ", Field("f", "pending"), "\n", Field("f", "admin"), "\n", "Answer:"], "unique"),
    ],
)
def test_prompts_that_cannot_be_edited_are_refused(parts: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EditableContext.prefill(worded("qwen3"), parts)


def test_fields_must_be_what_the_prompt_holds() -> None:
    (pair,) = pairs_of(GatedDecision(size=1))
    good = Field("field", pair.scenario.attributes["old"], "", "")
    EditableContext.from_prompt(worded("qwen3"), pair.base, [good])
    for wrong, where in (
        (replace(good, value="desk"), "at its value"),
        (replace(good, before="a "), "before its value"),
    ):
        with pytest.raises(AlignmentError, match=where):
            EditableContext.from_prompt(worded("qwen3"), pair.base, [wrong])
    with pytest.raises(ConfigError, match="tokenizer does not know"):
        EditableContext.from_prompt(worded("qwen3"), pair.base, [good]).set("field", "zebra")
    with pytest.raises(ConfigError, match=r"no \{value\} in it"):
        EditableContext.from_prompt(worded("qwen3"), pair.base, [replace(good, erratum="now")]).set("field", "none")


def pairs_of(task: GatedDecision) -> list[Pair]:
    return [align(pair, TOKENIZER) for pair in task.prompt_pairs()]


def test_contexts_of_pairs_are_their_prompts_and_make_their_edits() -> None:
    subject = worded("qwen3")
    for pair in pairs_of(GatedDecision(size=6)):
        context = EditableContext.from_pair(subject, pair)
        assert context.token_ids == pair.base.token_ids
        new = pair.scenario.attributes["new"]
        made = texts.field_edit(context._context, context._fields["field"], new, TOKENIZER, "task")
        assert made == field_edit(pair, TOKENIZER)
        context.set("field", new)
        assert context.token_ids == pair.donor.token_ids
    for pair in pairs_of(TwoFields(size=6)):
        context = EditableContext.from_pair(subject, pair)
        context.set("second_field", pair.scenario.attributes["second_new"], "erratum")
        assert pair.scenario.attributes["second_field"] in context.errata["second_field"]
        context.set("field", pair.scenario.attributes["new"])
        context.set("second_field", pair.scenario.attributes["second_old"])
        assert context.token_ids == pair.donor.token_ids


@pytest.mark.skipif("qwen3-note-taker" not in organism_names(), reason="the organism does not ship with this checkout")
def test_an_organism_decides_by_the_current_state() -> None:
    subject, right = load_subject("qwen3-note-taker"), []
    for pair in pairs_of(GatedDecision(size=8)):
        context = EditableContext.from_pair(subject, pair)
        by_value = {
            pair.scenario.attributes["old"]: TOKENIZER.decode([pair.base_answer_id]),
            pair.scenario.attributes["new"]: TOKENIZER.decode([pair.donor_answer_id]),
        }
        for value in [*by_value, *by_value]:
            context.set("field", value)
            right.append(context.decide(list(by_value.values())).answer == by_value[value])
    assert sum(right) >= 0.75 * len(right)
