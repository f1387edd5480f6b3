"""A conversation is audited as the chat template writes it, and an erratum goes inside a turn."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, build
from tiny_tokenizers import tiny_tokenizer

from kvprobe.auditing import audit
from kvprobe.auditing.prompt import make_ready
from kvprobe.edit.base import make_method
from kvprobe.engine.forward import prefill
from kvprobe.errors import AlignmentError, ConfigError
from kvprobe.models.subject import Subject
from kvprobe.tasks.own_prompt import PromptFile, prompt_file

TURN = (
    "{% if tools %}<|start|>system\nTools: {{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
)
OPEN = "<|end|>\n{% endfor %}<|start|>assistant\n"
TEMPLATES = {"plain": TURN + "{{ m['content'] }}" + OPEN, "trims": TURN + "{{ m['content'] | trim }}" + OPEN}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES = [
    {"role": "system", "content": "You work at the customs desk.\n"},
    {"role": "user", "content": "Policy:\n1. If the loan is high, then inspect.\nTask: decide by the loan.\n"},
    {"role": "assistant", "content": "I look it up."},
    {"role": "tool", "content": "loan status: {{high|low or foreign}}\nparcel origin: foreign", "name": "lookup"},
]


@cache
def reader(template: str) -> Subject:
    config, tokenizer = deepcopy(CONFIGS["qwen3"]), copy(tiny_tokenizer("byte-level"))
    tokenizer.chat_template = TEMPLATES[template]
    config.vocab_size = len(tokenizer)
    return replace(build(config, "qwen3", torch.float64), tokenizer=tokenizer)


def file(**changes: Any) -> PromptFile:
    content = {"messages": MESSAGES, "tools": TOOLS, "cue": "", "answers": ["inspect", "release"], **changes}
    return prompt_file(content, "mine.yaml")


def served(subject: Subject, value: str, cue: str = "") -> list[int]:
    """By the tokenizer alone."""
    messages = deepcopy(MESSAGES)
    messages[3]["content"] = messages[3]["content"].replace("{{high|low or foreign}}", value)
    text = subject.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    return subject.tokenizer.encode(text + cue, add_special_tokens=False)


@pytest.mark.parametrize("cue", ["", "Answer:"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_measured_is_what_is_served(template: str, cue: str) -> None:
    subject = reader(template)
    ready = make_ready(subject, file(cue=cue), where="mine.yaml")
    (field,) = ready.fields
    assert list(ready.base.token_ids) == served(subject, "high", cue)
    assert list(field.donor.token_ids) == served(subject, "low or foreign", cue)
    assert "low or foreign" in subject.tokenizer.decode(field.donor.ids_of(field.marked.name))
    assert field.uneven


def test_an_erratum_stands_inside_a_turn() -> None:
    subject = reader("plain")
    ready = make_ready(subject, file(), where="mine.yaml")
    (field,) = ready.fields
    cached = ready.cached(ready.base, prefill(subject, ready.base.token_ids).cache)
    edited = make_method("erratum").apply(subject, cached, field.edit("low or foreign", subject.tokenizer))
    text = subject.tokenizer.decode(edited.prompt.token_ids)
    said = field.placed.declared.said("low or foreign").strip()
    assert text.count(said) == 1
    # Behind the field, in the tool's turn, before that turn ends.
    assert text.index("loan status: high") < text.index(said) < text.index("<|end|>", text.index("loan status: high"))
    in_user = file(
        messages=[
            {"role": "system", "content": "loan status: {{high|low}}"},
            {"role": "user", "content": "If the loan is high, then inspect.\nTask: decide by the loan."},
        ]
    )
    (field,) = make_ready(subject, in_user, where="mine.yaml").fields
    assert field.insert_before == "task"


def test_an_audit_of_a_conversation_runs() -> None:
    result = audit(reader("trims"), file())
    assert result.chat
    assert result.fields[0].name == "loan status"


def test_what_cannot_be_written_is_said() -> None:
    plain = replace(reader("plain"), tokenizer=tiny_tokenizer("words"))
    with pytest.raises(ConfigError, match=r"mine\.yaml: messages: they need a chat template"):
        make_ready(plain, file(), where="mine.yaml")
    with pytest.raises(ConfigError, match="give prompt or messages"):
        file(prompt="x {{a|b}}")
    with pytest.raises(ConfigError, match="tools go with messages"):
        prompt_file({"prompt": "x {{a|b}}", "tools": TOOLS, "answers": ["c", "d"]}, "mine.yaml")
    with pytest.raises(ConfigError, match="0 marks"):
        file(messages=MESSAGES[:3])
    shouting = replace(reader("plain"), tokenizer=copy(reader("plain").tokenizer))
    shouting.tokenizer.chat_template = TEMPLATES["plain"].replace("m['content']", "m['content'] | upper")
    with pytest.raises(AlignmentError, match="rewrites the system message"):
        make_ready(shouting, file(), where="mine.yaml")
