"""After any edits by any methods a context is what its text says: text, fields and spans of a freshly parsed prompt.

The text is followed line by line in plain Python; nothing of it comes from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CONTROL, KINDS, tiny_tokenizer
from worded_models import plain_logits, worded

from kvprobe.edit.context import EditableContext, Field
from kvprobe.edit.erratum import erratum_name
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.models.subject import Subject

VALUES = {"loan": ("low", "high", "high or low"), "parcel": ("foreign", "domestic", "domestic or foreign")}
EXACT = {"full_downstream", "full_reprefill", "erratum", "hoist_to_end"}
IN_PLACE = {"field_only", "full_downstream", "full_reprefill", "cacheblend", "field_and_erratum"}
SAYING = {"erratum", "field_and_erratum"}
METHODS = sorted(IN_PLACE | SAYING | EXACT)


def parts(values: dict[str, str]) -> list[object]:
    return [
        "You work at the customs desk.\n",
        Field("loan", values["loan"], before="loan status: ", after="\n", erratum="Update: the loan is {value}.\n"),
        "\nPolicy\n",
        Field("parcel", values["parcel"], before="parcel origin: ", after="\n", erratum="Update: origin {value}.\n"),
        "If the parcel origin is foreign, then inspect.\n",
        ("task", "Task: decide by the origin.\n"),
        ("cue", "Answer:"),
    ]


@dataclass
class Written:
    """The prompt as lines, each with what it is."""

    lines: list[tuple[str, str]]
    values: dict[str, str] = field(default_factory=dict)

    @classmethod
    def fresh(cls) -> Written:
        values = {name: some[0] for name, some in VALUES.items()}
        lines = [
            ("system", "You work at the customs desk.\n"),
            ("loan", "loan status: {}\n"),
            ("policy", "\nPolicy\n"),
            ("parcel", "parcel origin: {}\n"),
            ("rule", "If the parcel origin is foreign, then inspect.\n"),
            ("task", "Task: decide by the origin.\n"),
            ("cue", "Answer:"),
        ]
        return cls(lines, values)

    def place(self, name: str) -> int:
        return [kind for kind, _ in self.lines].index(name)

    def set(self, name: str, value: str, method: str) -> None:
        self.lines = [line for line in self.lines if line[0] != erratum_name(name)]
        if method in IN_PLACE or method == "hoist_to_end":
            self.values[name] = value
        if method == "hoist_to_end":
            line = self.lines.pop(self.place(name))
            self.lines.insert(self.place("cue"), line)
        if method in SAYING:
            words = {"loan": f"Update: the loan is {value}.\n", "parcel": f"Update: origin {value}.\n"}[name]
            own, task = self.place(name), self.place("task")
            # In front of the task; a field that was hoisted behind it gets its line right after its own.
            self.lines.insert(task if own < task else own + 1, (erratum_name(name), words))

    def text(self) -> str:
        return "".join(text.format(self.values[kind]) if kind in self.values else text for kind, text in self.lines)


EDITS = st.lists(
    st.tuples(st.sampled_from(sorted(VALUES)), st.integers(0, 2), st.sampled_from(METHODS)), min_size=1, max_size=7
)


@cache
def reading(kind: str) -> Subject:
    """A tiny random model that reads with a tokenizer of some kind."""
    assert len(tiny_tokenizer(kind)) <= worded().config.vocab_size
    return replace(worded(), tokenizer=tiny_tokenizer(kind))


@cache
def begun(kind: str) -> EditableContext:
    return EditableContext.prefill(reading(kind), parts({name: some[0] for name, some in VALUES.items()}))


def start(kind: str = "words") -> EditableContext:
    return begun(kind).copy()


def check(context: EditableContext, written: Written) -> None:
    tokenizer = context.tokenizer
    assert list(context.token_ids) == tokenizer(written.text())["input_ids"], context.text
    for name, value in written.values.items():
        span = context.prompt.span(name)
        assert tokenizer.decode(context.token_ids[span.start : span.end]).strip() == value
        assert context.written[name] == value


@settings(max_examples=60)
@given(edits=EDITS, kind=st.sampled_from(KINDS))
def test_text_fields_and_spans_are_those_of_a_freshly_parsed_text(edits: list[tuple[str, int, str]], kind: str) -> None:
    context, written = start(kind), Written.fresh()
    for name, number, method in edits:
        context.set(name, VALUES[name][number], method)
        written.set(name, VALUES[name][number], method)
        check(context, written)
        assert context.state[name] == VALUES[name][number]


@settings(max_examples=20)
@given(edits=EDITS, kind=st.sampled_from(KINDS))
def test_methods_that_promise_a_prefill_hold_one(edits: list[tuple[str, int, str]], kind: str) -> None:
    context, whole = start(kind), True
    for name, number, method in edits:
        context.set(name, VALUES[name][number], method)
        whole = (whole and method in EXACT) or method == "full_reprefill"
        if whole:
            found = context.prompt.decide(reading(kind)).logits.double()
            torch.testing.assert_close(found, plain_logits(worded().model, context.token_ids), atol=1e-9, rtol=0)


def test_an_erratum_of_one_hoisted_field_never_goes_into_the_line_of_the_other() -> None:
    context, written = start(), Written.fresh()
    steps = [
        ("loan", "high", "hoist_to_end"),
        ("parcel", "domestic", "hoist_to_end"),
        ("loan", "low", "erratum"),
        ("loan", "high", "erratum"),
    ]
    for step in steps:
        context.set(*step)
        written.set(*step)
        check(context, written)
    context.set("loan", "low", "full_downstream")
    for against in ("text", "state"):
        assert context.seam(["inspect", "release"], against=against).total_variation == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"words"}))
@pytest.mark.parametrize("method", ["full_downstream", "erratum", "hoist_to_end"])
def test_control_tokens_in_a_value_are_text(kind: str, method: str) -> None:
    context = start(kind)
    tokenizer, control = context.tokenizer, "<|end|>"
    if tokenizer.tokenize(control, split_special_tokens=True) == [control] or tokenizer.unk_token_id is not None:
        # This vocabulary spells the control token in no other way, or knows no "|".
        with pytest.raises(ConfigError, match=r"as a control token alone|does not know"):
            context.set("loan", control, method)
        return
    context.set("loan", control, method)
    controls = context.tokenizer.convert_tokens_to_ids(list(CONTROL))
    assert not {*controls} & {*context.token_ids}
    assert "|end|" in context.text.replace(" ", "")


def test_an_edit_that_would_change_tokens_beside_it_is_refused() -> None:
    """Without a line break at its end the erratum's last word would be read as one with the task's first."""
    told = Field("loan", "low", before="loan status: ", after="\n", erratum="loan {value}")
    context = EditableContext.prefill(reading("words"), [told, ("task", "Task: decide.\n"), ("cue", "Answer:")])
    before = context.prompt
    with pytest.raises(UnsupportedError, match="put a line break before the joint"):
        context.set("loan", "high", "erratum")
    assert context.prompt is before
    context.set("loan", "high", "full_downstream")
