"""Answers are scored where they stand: cut as the whole text is, every spelling counted, against plain Hugging Face."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny_models import CONFIGS, build
from tiny_tokenizers import KINDS, tiny_tokenizer

from kvprobe.edit.context import EditableContext, Field
from kvprobe.models.subject import Subject
from kvprobe.tasks.answers import blank_before, spellings

ENDS = ("Answer:", "Answer:\n", "答え：")
ANSWERS = {"Answer:": ("inspect", "release"), "Answer:\n": ("inspect", "release"), "答え：": ("赤", "青")}


@cache
def reader(kind: str) -> Subject:
    """A tiny random model behind a tokenizer."""
    config, tokenizer = deepcopy(CONFIGS["qwen3"]), tiny_tokenizer(kind)
    config.vocab_size = len(tokenizer)
    return replace(build(config, "qwen3", torch.float64), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("before", "answer", "blank"),
    [
        ("Answer:", "cancel", " "),
        ("Answer:\n", "cancel", ""),
        ("Answer: ", "cancel", ""),
        ('Answer: "', "cancel", ""),
        ("Answer (", "cancel", ""),
        ("答え：", "赤", ""),
        ("Answer:", "赤", ""),
        ("answer：", "cancel", ""),
        ("대답:", "취소", " "),
        ("", "cancel", ""),
    ],
)
def test_a_blank_stands_where_the_text_has_one(before: str, answer: str, blank: str) -> None:
    assert blank_before(answer, before) == blank


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_spelling_is_what_the_whole_text_is_cut_into(kind: str, end: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = tokenizer.encode(f"The loan is low.\n{end}", add_special_tokens=False)
    for answer in ANSWERS[end]:
        found, ought = spellings(answer, ids, tokenizer), {}
        for way in dict.fromkeys((blank_before(answer, end), "", *([] if end[-1].isspace() else [" "]))):
            whole = tokenizer.encode(f"The loan is low.\n{end}{way}{answer}", add_special_tokens=False)
            if whole[: len(ids)] == ids and tokenizer.unk_token_id not in whole[len(ids) :]:
                ought[way] = tuple(whole[len(ids) :])
        assert set(ought.values()) <= set(found)
        # Where the answer would merge with the prompt's end, the model can still write it by itself.
        assert found[0] == ought.get(blank_before(answer, end), found[0])
        assert len(set(found)) == len(found) <= 2


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_probability_of_all_its_spellings(kind: str, end: str) -> None:
    subject = reader(kind)
    if subject.tokenizer.unk_token_id in subject.tokenizer.encode("".join((end, *ANSWERS[end]))):
        pytest.skip("the tokenizer does not know these words")
    context = EditableContext.prefill(subject, ["loan status: ", Field("status", "low"), "\n", ("cue", end)])
    decision = context.decide(ANSWERS[end])
    for answer in ANSWERS[end]:
        total = 0.0
        for said in spellings(answer, context.token_ids, subject.tokenizer):
            with torch.no_grad():
                ids = torch.tensor([[*context.token_ids, *said]])
                chances = subject.model(ids).logits[0].double().softmax(-1)
            start = len(context.token_ids) - 1
            total += float(torch.stack([chances[start + n, token] for n, token in enumerate(said)]).prod())
        assert decision.probabilities[answer] == pytest.approx(total, rel=1e-6)
    assert sum(decision.probabilities.values()) <= 1 + 1e-9


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["byte-level", "byte-level GPT-2", "metaspace"])
def test_what_the_model_surely_writes_is_what_it_decides(kind: str, end: str) -> None:
    """A model made to write one of the answers in one of the spellings is read as deciding for it."""
    subject = reader(kind)
    if subject.tokenizer.unk_token_id in subject.tokenizer.encode("".join((end, *ANSWERS[end]))):
        pytest.skip("the tokenizer does not know these words")
    context = EditableContext.prefill(subject, ["loan status: ", Field("status", "low"), "\n", ("cue", end)])
    head = subject.model.get_output_embeddings()
    for answer in ANSWERS[end]:
        for said in (ids for ids in spellings(answer, context.token_ids, subject.tokenizer) if len(ids) == 1):

            def insist(module: torch.nn.Module, given: object, output: torch.Tensor, wanted: int = said[0]) -> None:
                output[..., wanted] += 1e4

            handle = head.register_forward_hook(insist)
            try:
                assert context.generate(limit=1).token_ids[0] == said[0]
                assert context.decide(ANSWERS[end]).answer == answer
            finally:
                handle.remove()
