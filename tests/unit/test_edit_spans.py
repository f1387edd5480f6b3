"""Spans taken out of a cached prompt and put in, against plain Hugging Face."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache
from worded_models import plain_logits, worded

from kvprobe.edit.context import EditableContext, Field
from kvprobe.errors import ConfigError, UnsupportedError

FIELD = "order status"
PARTS = [
    ("system", "You work at the pending desk.\n"),
    "order status: ",
    Field(FIELD, "pending"),
    "\n",
    ("role", "account role: admin\n"),
    ("policy", "If the order status is pending, then cancel.\nIf the order status is shipped, then deny.\n"),
    ("task", "Task: decide by the status.\nReply with cancel or deny.\n"),
    ("cue", "Answer:"),
]
SEGMENTS = (FIELD, "role", "policy")
EXACT = 1e-5
families = pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "mistral"])


def context(family: str = "qwen3") -> EditableContext:
    return EditableContext.prefill(worded(family), PARTS)


def logits(made: EditableContext) -> torch.Tensor:
    return made.prompt.decide(made._subject).logits.double()


def near(found: torch.Tensor, ought: torch.Tensor) -> None:
    torch.testing.assert_close(found, ought, atol=EXACT, rtol=0)


@families
@settings(max_examples=6)
@given(names=st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3, unique=True))
def test_what_is_recomputed_is_a_prefill_of_the_text_without_it(family: str, names: list[str]) -> None:
    made, before = context(family), context(family).text
    for name in names:
        made.remove(name)
    assert set(made.prompt.spans) & {*names} == set()
    assert made.state == ({} if FIELD in names else {FIELD: "pending"})
    near(logits(made), plain_logits(worded(family).model, made.token_ids))
    assert len(made.text) < len(before)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("name", SEGMENTS)
def test_a_gap_is_what_hiding_the_entries_from_the_decision_is(family: str, name: str) -> None:
    made, whole, model = context(family), context(family), worded(family).model
    spans = [span for segment, span in whole.prompt.spans.items() if segment == name or segment.endswith(f" {name}")]
    gone = [position for span in spans for position in span.positions]
    made.remove(name, "gap")
    assert made.prompt.cache.positions.tolist() == [
        place for place in range(len(whole.token_ids) - 1) if place not in gone
    ]
    past, mask = DynamicCache(), torch.ones(1, len(whole.token_ids), dtype=torch.long)
    mask[0, gone] = 0
    with torch.no_grad():
        model(torch.tensor([whole.token_ids[:-1]]), past_key_values=past, use_cache=True)
        last = torch.tensor([whole.token_ids[-1:]])
        places = torch.tensor([[len(whole.token_ids) - 1]])
        hidden = model(last, past_key_values=past, attention_mask=mask, position_ids=places).logits[0, -1].double()
    near(logits(made), hidden)
    # The entries behind have read what is gone.
    assert (logits(made) - plain_logits(model, made.token_ids)).abs().max() > 100 * EXACT


@families
@pytest.mark.parametrize("behind", ["rotated", "recomputed"])
def test_what_is_put_in_and_taken_out_again_leaves_the_cache_as_it_was(family: str, behind: str) -> None:
    made, whole = context(family), context(family)
    made.insert("note", "account role: guest\n", "policy", behind)  # type: ignore[arg-type]
    if behind == "recomputed":
        near(logits(made), plain_logits(worded(family).model, made.token_ids))
    else:
        new = made.prompt.spans["note"]
        ought = EditableContext.prefill(worded(family), [*PARTS[:5], ("note", "account role: guest\n"), *PARTS[5:]])
        assert ought.token_ids == made.token_ids
        for mine, theirs in zip(made.prompt.cache.layers, ought.prompt.cache.layers, strict=True):
            near(mine.keys[:, :, : new.end], theirs.keys[:, :, : new.end])
    made.remove("note", behind)  # type: ignore[arg-type]
    assert made.token_ids == whole.token_ids
    for mine, theirs in zip(made.prompt.cache.layers, whole.prompt.cache.layers, strict=True):
        near(mine.keys, theirs.keys)
        near(mine.values, theirs.values)


def test_a_field_goes_with_its_line_and_its_erratum() -> None:
    made = context()
    made.set(FIELD, "shipped", "erratum")
    cost = made.remove(FIELD)
    assert "Update" not in made.text
    assert "order status:" not in made.text
    assert made.errata == {}
    assert cost.tokens < 2 * len(made.token_ids)
    near(logits(made), plain_logits(worded("qwen3").model, made.token_ids))
    with pytest.raises(ConfigError, match="no field"):
        made.set(FIELD, "pending")


def test_a_copy_keeps_what_the_original_loses() -> None:
    made = context()
    kept = made.copy()
    made.remove(FIELD, "rotated")
    assert kept.state == {FIELD: "pending"}
    kept.set(FIELD, "shipped")
    assert kept.seam(["cancel", "deny"]).total_variation < EXACT


def test_what_cannot_be_is_said_in_one_sentence() -> None:
    made = context()
    for action, error, words in (
        (lambda: made.remove("rule"), ConfigError, "no segment 'rule'"),
        (lambda: made.remove("before order status"), ConfigError, "remove the field"),
        (lambda: made.remove("cue"), ConfigError, "last token"),
        (lambda: made.remove("role", "moved"), ConfigError, "gap, rotated, recomputed"),  # type: ignore[arg-type]
        (lambda: made.insert("role", "x", "task"), ConfigError, "already"),
        (lambda: made.insert("note", "", "task"), ConfigError, "empty"),
        (lambda: made.insert("note", "x", "nowhere"), ConfigError, "no segment 'nowhere'"),
    ):
        with pytest.raises(error, match=words):
            action()  # type: ignore[no-untyped-call]
    made.remove("role", "gap")
    with pytest.raises(UnsupportedError, match="gap"):
        made.set(FIELD, "shipped")
    with pytest.raises(UnsupportedError, match="gap"):
        made.remove(FIELD)
    assert made.decide(["cancel", "deny"]).answer in ("cancel", "deny")
    inputs = made.to_hugging_face()
    with torch.no_grad():
        last = {"input_ids": inputs["input_ids"][:, -1:], "position_ids": inputs["position_ids"][:, -1:]}
        found = worded("qwen3").model(**last, past_key_values=inputs["past_key_values"]).logits[0, -1]
    near(found.double(), logits(made))
