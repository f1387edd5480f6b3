"""The explore page's numbers are those of plain Hugging Face and of an audit; its states are files that an audit reads."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from typer.testing import CliRunner

from kvprobe import auditing
from kvprobe.auditing import AuditResult, audit
from kvprobe.cli import explore as command
from kvprobe.cli.app import app
from kvprobe.errors import ConfigError
from kvprobe.explore import Choice, Session, State, read_state
from kvprobe.explore.shown import Event, events
from kvprobe.models.loader import load_subject
from kvprobe.tasks.own_prompt import Answers, PromptFile, read_prompt_file

server = pytest.importorskip("kvprobe.explore.server", reason="starlette and uvicorn are not installed")
EXAMPLE = Path(auditing.__file__).parent / "example.yaml"
assert command


@cache
def session() -> Session:
    return Session(load_subject("qwen3-note-taker", device="cpu", dtype=torch.float64))


@cache
def audited() -> AuditResult:
    return audit(session().subject, EXAMPLE)


def state(**choice: object) -> State:
    return State(prompt=read_prompt_file(EXAMPLE), choice=Choice.model_validate(choice))


def shown(given: State) -> dict[str, Event]:
    return {event["event"]: event for event in events(session(), given)}


def plainly(positions: list[int], part: str, layers: tuple[int, int]) -> float:
    """The margin of a transplant, from Hugging Face's own caches."""
    subject, text = session().subject, read_prompt_file(EXAMPLE).prompt + "Answer:"
    old, new = (
        subject.tokenizer(text.replace("{{foreign|domestic}}", value), return_tensors="pt")["input_ids"]
        for value in ("foreign", "domestic")
    )
    past, donor = DynamicCache(), DynamicCache()
    subject.model(old[:, :-1], past_key_values=past, use_cache=True)
    subject.model(new[:, :-1], past_key_values=donor, use_cache=True)
    for number in range(layers[0], layers[1] + 1):
        mine, other = past.layers[number], donor.layers[number]
        if part != "values":
            mine.keys[:, :, positions] = other.keys[:, :, positions]
        if part != "keys":
            mine.values[:, :, positions] = other.values[:, :, positions]
    logits = subject.model(old[:, -1:], past_key_values=past).logits[0, -1]
    inspect, release = (
        subject.tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in ("inspect", "release")
    )
    return float(logits[release] - logits[inspect])


@given(
    st.lists(st.integers(0, 72), unique=True),
    st.sampled_from(["both", "keys", "values"]),
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted).map(tuple),
)
def test_a_transplant_is_that_of_plain_hugging_face(positions: list[int], part: str, layers: tuple[int, int]) -> None:
    prepared = session().prepared(state())
    found = session().transplanted(prepared, Choice(positions=positions, part=part, layers=layers)).decided
    assert found.margin == pytest.approx(plainly(positions, part, layers), abs=1e-9)


def test_edits_readings_and_heat_are_those_of_an_audit() -> None:
    (field,) = audited().fields
    prepared = session().prepared(state())
    for method in field.methods:
        if method.forward is None:
            continue
        tried = session().edited(prepared, method.name)
        assert (tried.decided.answer, tried.decided.recovery) == (
            method.forward.decision,
            pytest.approx(method.forward.recovery),
        )
    *_, values = session().heat(prepared, Choice())
    assert values == pytest.approx([token.recovery for token in field.tokens if token.recovery is not None])
    assert len(shown(state())["prompt"]["warnings"]) == len(shown(state(model="another"))["prompt"]["warnings"]) - 1
    found = shown(state(positions=range(prepared.read.pair.field.end, prepared.reach.stop)))
    assert found["transplant"]["bar"]["recovery"] == pytest.approx(field.set("downstream").recovery)
    for kind, there in (("old", field.stale), ("new", field.oracle)):
        bar = found["prompt"][kind]
        assert (bar["answer"], bar["margin"]) == (there.decision, pytest.approx(there.margin))
        assert sum(bar["probabilities"].values()) == pytest.approx(there.mass)
    assert field.erratum is not None
    assert found["edit"]["erratum"] == {"line": field.erratum.line, "before": field.erratum.before}


def test_a_heat_that_was_interrupted_goes_on_where_it_was() -> None:
    prepared, choice = session().prepared(state()), Choice(part="keys")
    first = session().heat(prepared, choice)
    begun = [len(next(first)) for _ in range(2)]
    first.close()
    assert begun[0] == 0 < begun[1] < len(prepared.reach)
    assert len(next(session().heat(prepared, choice))) == begun[1]


printed = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t\x7f\x85\u2028\ufeff🙂"), min_size=1
)


@given(printed, st.lists(st.integers(0, 10**6)), printed)
def test_a_state_s_file_is_read_back_as_it_is_and_by_an_audit(text: str, positions: list[int], name: str) -> None:
    prompt = PromptFile(name=name, prompt=f"{text}{{{{old|new}}}}{text}", answers=["yes", "no"])
    kept = State(prompt=prompt).content()
    whole = State(prompt=prompt, choice=Choice(positions=positions, part="keys", kept=kept))
    back = read_state(whole.file(), "the file")
    assert back.choice == whole.choice
    assert back.prompt.model_copy(update={"explore": None}) == prompt


def test_an_audit_reads_the_prompt_of_a_state(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text(state(positions=[3], method="field_only").file(), encoding="utf-8")
    found = read_prompt_file(file)
    assert found.explore == {"positions": [3], "method": "field_only"}
    assert found.model_copy(update={"explore": None}) == read_prompt_file(EXAMPLE)


def test_a_new_value_stands_in_the_mark_of_its_field() -> None:
    prompt = PromptFile(prompt="{{a: x|y}} and {{b: x|y}}.", answers=["yes", "no"])
    assert prompt.with_new_value("b", " two words ", "here").prompt == "{{a: x|y}} and {{b: x|two words}}."
    turns = [{"role": "user", "content": "{{a: x|y}}"}, {"role": "tool", "content": "{{b: x|y}} now"}]
    chat = PromptFile(messages=turns, answers=["yes", "no"]).with_new_value("b", "z", "here")
    assert [turn.content for turn in chat.messages] == ["{{a: x|y}}", "{{b: x|z}} now"]
    assert read_state(State(prompt=chat).file(), "here").prompt.model_copy(update={"explore": None}) == chat
    for field, value in (("c", "z"), ("b", ""), ("b", "a|b")):
        with pytest.raises(ConfigError, match=r"field 'c'|cannot stand"):
            prompt.with_new_value(field, value, "here")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prompt: no mark\nanswers: [a, b]", "mark the field"),
        ("explore: {part: queries}\n" + EXAMPLE.read_text(), "explore.part"),
        ("[", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_state_is_told_in_a_sentence(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_state(text, "The prompt")


@pytest.mark.parametrize("choice", [{"positions": [73]}, {"layers": (0, 6)}, {"layers": (3, 2)}])
def test_entries_and_layers_that_are_not_there_are_refused(choice: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"this prompt|model has layers"):
        shown(state(**choice))


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    page = server.Server(session(), state())
    thread = threading.Thread(target=page.run)
    thread.start()
    yield page.url
    page.stop()
    thread.join()


def answer(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
            assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_only_who_knows_the_address_is_answered(served: str) -> None:
    bare, port = served.partition("?")[0], served.split(":")[2].partition("/")[0]
    assert answer(served) == 200
    assert answer(served, Origin=bare.rstrip("/")) == 200
    for refused in (bare, bare + "?token=", served[:-1], bare + "show"):
        assert answer(refused) == 403
    # A name that another page's owner has pointed to this machine, and that page itself.
    assert answer(served, Host=f"evil.example:{port}") == 403
    assert answer(served, Host="127.0.0.1:1") == 403
    assert answer(served, Origin="http://evil.example") == 403
    assert served.startswith("http://127.0.0.1:")


def test_a_new_state_ends_the_computation_before_it() -> None:
    turns = server._Turns()

    def endless() -> Iterator[Event]:
        while True:
            yield {"event": "progress"}

    async def both() -> list[str]:
        first = turns.run(endless)
        assert "progress" in await anext(first)
        # There is one thread for all: the second begins only when the first is over.
        told = [event async for event in turns.run(lambda: iter([{"event": "done"}]))]
        assert [event async for event in first][-1:] != told
        return told

    assert asyncio.run(both()) == ['data: {"event": "done"}\n\n']


def test_what_is_missing_is_told_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprobe.cli.explore.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["explore"])
    assert result.exit_code == 1
    assert result.output == "Error: The page needs starlette and uvicorn: pip install 'kvprobe[explore]'.\n"


def test_where_an_audit_concludes_nothing_no_recovery_is_told() -> None:
    prompt = read_prompt_file(EXAMPLE).model_copy(update={"answers": Answers(old="release", new="inspect")})
    found = shown(State(prompt=prompt))
    assert found["prompt"]["problem"] == audit(session().subject, prompt).fields[0].conclusions[0]
    assert found["transplant"]["bar"]["recovery"] is None
    assert "heat" not in found


def test_values_of_unequal_length_are_edited_and_not_transplanted() -> None:
    prompt = read_prompt_file(EXAMPLE).with_new_value("parcel origin", "foreign domestic", "here")
    found = shown(State(prompt=prompt))
    assert (found["prompt"]["end"], found["prompt"]["positions"]) == (0, ())
    assert any("differ in length" in told for told in found["prompt"]["warnings"])
    assert not {"transplant", "heat"} & set(found)
    assert found["edit"]["bar"]["margin"] != found["prompt"]["old"]["margin"]
