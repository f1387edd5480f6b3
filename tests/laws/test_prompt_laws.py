"""The prompt measured is the prompt served: tokens of the whole text, and segments where their characters are."""

from __future__ import annotations

import re
from ast import literal_eval
from copy import copy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CONTROL, KINDS, THOUGHT, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from kvprobe.errors import AlignmentError, ConfigError
from kvprobe.tasks.chat import chat_wrapped
from kvprobe.tasks.context import Context, Segment, TokenizedContext, tokenize

TURN = "{% for m in messages %}<|start|>{{ m['role'] }}\n"
OPEN = "<|end|>\n{% endfor %}<|start|>assistant\n"
TEMPLATES = {
    "plain": TURN + "{{ m['content'] }}" + OPEN,
    "trims": "{{ bos_token }}" + TURN + "{{ m['content'] | trim }}" + OPEN,
    "trims the end": TURN + "{{ m['content'].rstrip() }}\n" + OPEN,
    "bare": "{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
    "thinks and is told not to": TURN + "{{ m['content'] }}" + OPEN + "<think>\n\n</think>\n\n",
}
PIECES = [
    *(" ", "  ", "\n", "\n\n", ".\n", ":", ": ", "1.", "\t", '"', "é", "赤", "ﬁ", "　", "a\u0301"),
    *("loan", " status", "high or low", "Policy", " pending", "If", " the loan", "desk.", "foreign"),
]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
HOSTILE = st.lists(st.sampled_from([*PIECES, *CONTROL, *THOUGHT, "<|", "start|>"]), min_size=1, max_size=4).map("".join)
SOME_KIND = st.sampled_from(KINDS)


def contexts(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Context]:
    pieces = st.lists(texts, min_size=1, max_size=6)
    return pieces.map(lambda found: Context.of(*((f"s{place}", text) for place, text in enumerate(found))))


@cache
def chatting(kind: str, template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy(tiny_tokenizer(kind))
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def served(tokenizer: Any, text: str, **options: Any) -> list[int]:
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False, **options)


def check_spans(tokens: TokenizedContext) -> None:
    """Spans tile the tokens, and a segment's tokens hold its text where no token reaches over its edges."""
    shares, spans = tokens.token_texts(), list(tokens.spans.values())
    assert "".join(shares) == tokens.text or not tokens.text.strip()
    assert all(left.end == right.start for left, right in pairwise(spans))
    assert spans[-1].end == len(tokens.token_ids)
    ends = set()
    for place in range(len(shares) + 1):
        ends.add(len("".join(shares[:place])))
    start = 0
    for segment, span in zip(tokens.source.segments, spans, strict=True):
        end = start + len(segment.text)
        if {start, end} <= ends and not tokens.text[start:end].isspace():
            held = "".join(shares[span.start : span.end])
            assert held.strip() == segment.text.strip()
        start = end


@settings(max_examples=150)
@given(kind=SOME_KIND, context=contexts(TEXTS))
def test_a_context_is_the_tokens_of_its_whole_text(kind: str, context: Context) -> None:
    tokenizer = tiny_tokenizer(kind)
    tokens = tokenize(context, tokenizer)
    assert list(tokens.token_ids) == tokenizer(context.text)["input_ids"]
    check_spans(tokens)


@settings(max_examples=100)
@given(kind=SOME_KIND, context=contexts(TEXTS), place=st.integers(0, 5))
def test_a_field_holds_its_own_text_or_the_wording_that_parts_it_is_said(
    kind: str, context: Context, place: int
) -> None:
    tokenizer = tiny_tokenizer(kind)
    segment = context.segments[place % len(context.segments)]
    try:
        tokens = tokenize(context, tokenizer, (segment.name,))
    except AlignmentError as refused:
        over = re.search(r"it: (.*) is one token.*; (?:write (.*) there or )?choose another value", str(refused))
        assert over is not None
        assert len(literal_eval(over[1])) > 1
        return
    if tokenizer.unk_token_id not in tokens.token_ids:
        span = tokens.spans[segment.name]
        assert "".join(tokens.token_texts()[span.start : span.end]).strip() == segment.text.strip()


@settings(max_examples=150)
@given(kind=SOME_KIND, context=contexts(HOSTILE), name=st.sampled_from(sorted(TEMPLATES)), cue=st.booleans())
def test_a_chat_is_what_the_template_serves_and_control_tokens_in_it_are_text(
    kind: str, context: Context, name: str, cue: bool
) -> None:
    if kind == "words":
        kind = "byte-level"
    tokenizer = chatting(kind, name)
    if not context.text.strip():
        return
    said = context.text
    if cue:
        context = Context((*context.segments, Segment("cue", "Answer:")))
    try:
        expected = served(tokenizer, said, sanitize_control_tokens=True)
    except ValueError:
        with pytest.raises(ConfigError, match="as a control token alone"):
            tokenize(chat_wrapped(context, tokenizer), tokenizer)
        return
    tokens = tokenize(chat_wrapped(context, tokenizer), tokenizer)
    if not cue:
        assert list(tokens.token_ids) == expected
        check_spans(tokens)
    elif not any(control in said for control in (*CONTROL, *THOUGHT)):
        rendered = served(tokenizer, said, tokenize=False) + "Answer:"
        assert list(tokens.token_ids) == tokenizer.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TURN + "{{ m['content'] | upper }}" + OPEN, r"rewrites the text .*'order: pending'"),
        (TURN + "{{ m['content'] | replace('order', 'a') }}" + OPEN, r"rewrites the text"),
        (TURN + "{% for part in m['content'] %}{{ part.text }}{% endfor %}" + OPEN, r"rewrites the text"),
        (TURN + "{{ m['content'] }}" + OPEN + "<think>\n", r"leaves it open .*enable_thinking: false"),
        (TURN + "{{ m['content'] }}</think>" + OPEN + "[THINK]", r"leaves it open"),
        ("{{ raise_exception('only after a system turn') }}", r"fails \(only after a system turn\)"),
        ("{{ messages[0].nothing.at_all }}", r"fails \("),
        ("{% if %}", r"fails \("),
    ],
)
def test_a_template_that_serves_something_else_is_one_sentence(template: str, said: str) -> None:
    tokenizer = copy(tiny_tokenizer("byte-level"))
    tokenizer.chat_template = template
    with pytest.raises(AlignmentError, match=said) as refused:
        chat_wrapped(Context.of(("field", "order: pending"), ("cue", "Answer:")), tokenizer)
    assert str(refused.value).count("\n") == 0
