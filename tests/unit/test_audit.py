"""Audit of one's own prompt: known truth on micro-models, plain Hugging Face numbers, errors, JSON, the page."""

from __future__ import annotations

import json
import re
import time
from copy import deepcopy
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape
from transformers import DynamicCache
from typer.testing import CliRunner

import kvprobe.auditing as package
from kvprobe.auditing import AuditResult, Dependence, Safety, audit, measure
from kvprobe.auditing.methods import REFERENCE
from kvprobe.auditing.prompt import make_ready
from kvprobe.auditing.result import Trial
from kvprobe.auditing.verdict import conclude, judged_safety
from kvprobe.cli import audit as command
from kvprobe.cli import look
from kvprobe.cli.app import app
from kvprobe.edit.base import make_method
from kvprobe.errors import AlignmentError, ConfigError, KvprobeError, UnknownNameError
from kvprobe.html import audit_page
from kvprobe.models.loader import load_subject
from kvprobe.models.subject import Subject
from kvprobe.tasks.own_prompt import read_prompt_file

EXAMPLE = Path(package.__file__).parent / "example.yaml"
assert command
assert look


@cache
def micro(kind: str) -> Subject:
    return load_subject(f"micro-{kind}", device="cpu")


@cache
def audited(kind: str) -> AuditResult:
    return audit(micro(kind), EXAMPLE)


@pytest.fixture
def two_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what every conclusion needs, to be quick."""
    chosen = {name: make_method(name) for name in (REFERENCE, "field_only")}
    monkeypatch.setattr("kvprobe.auditing.methods.methods_to_try", lambda: chosen)


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_note_taker_holds_its_notes_at_the_full_stops_of_the_rule_and_cannot_be_edited_in_place() -> None:
    (field,) = audited("note-taker").fields
    assert field.dependence is Dependence.DEPENDS
    assert field.method("field_only").safety is Safety.UNSAFE
    assert field.set("field").recovery == pytest.approx(0, abs=1e-3)
    assert field.set("downstream").recovery == pytest.approx(1, abs=1e-3)
    acting = [token for token in field.tokens if token.recovery is not None and abs(token.recovery) > 0.01]
    assert [(token.text.strip(), token.segment) for token in acting] == [(".", "line 5"), (".", "line 6")]
    assert field.set("top 2").recovery == pytest.approx(1, abs=1e-3)
    assert "is not safe" in field.conclusions[2]


def test_a_reader_can_be_edited_in_place_and_that_is_the_cheapest() -> None:
    (field,) = audited("reader").fields
    assert field.method("field_only").safety is Safety.SAFE
    assert field.cheapest == "field_only"
    acting = [token.text.strip() for token in field.tokens if abs(token.recovery or 0.0) > 0.01]
    assert acting == ["foreign"]
    assert "is safe here" in field.conclusions[2]


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_what_holds_for_every_model(kind: str) -> None:
    (field,) = audited(kind).fields
    assert field.set("all").recovery == pytest.approx(1, abs=1e-4)
    assert field.set("none").recovery == pytest.approx(0, abs=1e-4)
    for exact in ("full_downstream", REFERENCE):
        assert field.method(exact).safety is Safety.SAFE
    assert field.method("stale").safety is Safety.UNSAFE
    assert field.method("stale").tokens == 0
    assert field.method(REFERENCE).tokens == audited(kind).tokens - 1
    assert field.method("field_only").token_share == pytest.approx(1 / (audited(kind).tokens - 1))
    possible = [method.flops for method in field.methods if method.safety is not Safety.IMPOSSIBLE]
    assert possible == sorted(possible)


def test_a_token_s_recovery_is_that_of_plain_hugging_face_in_float64(two_methods: None) -> None:
    subject = load_subject("qwen3-note-taker", dtype=torch.float64, device="cpu")
    (field,) = audit(subject, EXAMPLE).fields
    token = max((token for token in field.tokens if token.position >= field.span[1]), key=lambda t: t.recovery or 0.0)
    texts = [
        read_prompt_file(EXAMPLE).prompt.replace("{{foreign|domestic}}", v) + "Answer:" for v in ("foreign", "domestic")
    ]
    ids = [subject.tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    old_word, new_word = (
        subject.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("inspect", "release")
    )

    def margin(position: int | None, prompt: torch.Tensor, donor: torch.Tensor) -> float:
        caches = [DynamicCache(), DynamicCache()]
        for past, tokens in zip(caches, (prompt, donor), strict=True):
            subject.model(tokens[:, :-1], past_key_values=past, use_cache=True)
        if position is not None:
            for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
                mine.keys[:, :, position], mine.values[:, :, position] = (
                    other.keys[:, :, position],
                    other.values[:, :, position],
                )
        logits = subject.model(prompt[:, -1:], past_key_values=caches[0]).logits[0, -1]
        return float(logits[new_word] - logits[old_word])

    with torch.no_grad():
        stale, oracle, moved = margin(None, ids[0], ids[1]), margin(None, ids[1], ids[0]), margin(token.position, *ids)
    assert 0.05 < (token.recovery or 0.0) < 0.95
    assert token.recovery == pytest.approx((moved - stale) / (oracle - stale), abs=1e-8)
    assert (field.stale.margin, field.oracle.margin) == pytest.approx((stale, oracle), abs=1e-8)


def test_json_gives_back_the_result() -> None:
    result = audited("reader")
    assert AuditResult.model_validate_json(result.model_dump_json()) == result
    assert json.loads(result.model_dump_json())["fields"][0]["cheapest"] == "field_only"


def test_one_prompt_has_no_interval() -> None:
    result = audited("reader")
    assert "n = 1" in result.caveat
    assert not re.search(r"interval\W+\[|confidence|\bCI\b|p =", audit_page(result))


TWO = """
prompt: |
  Session
  parcel origin: {{foreign|domestic}}
  parcel quality: {{poor|good}}
  Policy
  If the parcel origin is foreign, then inspect.
  If the parcel origin is domestic, then release.
  Task: decide by the origin. Reply with inspect or release.
"""


def test_each_of_several_fields_is_changed_alone(tmp_path: Path, two_methods: None) -> None:
    answers = "answers: {old: inspect, new: {parcel origin: release, parcel quality: inspect}}\n"
    result = audit(micro("reader"), written(tmp_path, TWO + answers))
    assert [field.dependence for field in result.fields] == [Dependence.DEPENDS, Dependence.NOT_ASKED]
    assert not result.field("parcel quality").judged
    listed = audit(micro("reader"), written(tmp_path, TWO + "answers: [release, inspect]\n"), fields=["parcel quality"])
    assert [field.dependence for field in listed.fields] == [Dependence.NONE]
    assert "No further conclusions are drawn" in listed.fields[0].conclusions[0]


def test_a_wrong_decision_concludes_nothing(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("{old: inspect, new: release}", "{old: release, new: inspect}")
    (field,) = audit(micro("reader"), written(tmp_path, text)).fields
    assert field.dependence is Dependence.WRONG
    assert not field.methods
    assert not field.segments
    assert "No further conclusions are drawn" in field.conclusions[0]


def test_a_margin_that_moves_is_located_where_no_decision_turns(two_methods: None) -> None:
    """A model that prefers one answer whatever the prompt says, by more than the field moves."""
    subject = deepcopy(micro("note-taker"))
    (whole,) = audit(subject, EXAMPLE).fields
    (favourite,) = subject.tokenizer.encode(f" {whole.answers[0]}", add_special_tokens=False)

    def prefer(module: object, given: object, logits: torch.Tensor) -> torch.Tensor:
        return logits + 100.0 * torch.nn.functional.one_hot(torch.tensor(favourite), logits.shape[-1]).to(logits)

    subject.model.get_output_embeddings().register_forward_hook(prefer)
    (field,) = audit(subject, EXAMPLE).fields
    assert field.dependence is Dependence.MARGIN_ONLY
    assert field.stale.decision == field.oracle.decision == whole.answers[0]
    assert field.set("downstream").recovery == pytest.approx(whole.set("downstream").recovery, abs=1e-3)
    assert not field.methods
    assert field.conclusions[0].startswith("Margin only, no decision turns")
    assert "Margin only" in audit_page(audit(subject, EXAMPLE))


@pytest.mark.parametrize(
    ("ways", "restated", "safety"),
    [
        ((1.0, 1.0), (0.0, 0.0), Safety.SAFE),
        ((2.0, 1.6), (-0.9, 0.1), Safety.SAFE),
        ((0.8, 0.76), (0.2, 0.0), Safety.SAFE),
        ((0.7, 1.0), (0.0, 0.0), Safety.FRAGILE),
        ((1.0, 1.0), (0.0, 0.3), Safety.FRAGILE),
    ],
)
def test_a_clearer_margin_than_a_prefill_s_is_no_fault(
    ways: tuple[float, float], restated: tuple[float, float], safety: Safety
) -> None:
    forward, backward, *others = (Trial(decision="a", oracle="a", recovery=recovery) for recovery in (*ways, *restated))
    assert judged_safety(forward, backward, others)[0] is safety


def test_answers_that_begin_alike_are_compared_where_they_part(tmp_path: Path, two_methods: None) -> None:
    """The margin is that of the whole answers: what they share cancels out."""
    text = EXAMPLE.read_text().replace("{old: inspect, new: release}", "{old: parcel inspect, new: parcel release}")
    subject = micro("note-taker")
    result = audit(subject, written(tmp_path, text))
    assert result.warnings[0].startswith("All answers begin with 'parcel'")
    assert result.answers == ("inspect", "release")
    ids = make_ready(subject, read_prompt_file(EXAMPLE), where="").base.token_ids
    with torch.no_grad():
        whole = {}
        for answer in ("parcel inspect", "parcel release"):
            said = subject.tokenizer.encode(answer, add_special_tokens=False)
            chances = subject.model(torch.tensor([[*ids, *said]])).logits[0].double().log_softmax(-1)
            whole[answer] = sum(float(chances[len(ids) - 1 + n, token]) for n, token in enumerate(said))
    margin = whole["parcel release"] - whole["parcel inspect"]
    assert result.fields[0].stale.margin == pytest.approx(margin, abs=1e-3)


def test_values_of_unequal_length_are_edited_and_not_located(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("{{foreign|domestic}}", "{{foreign|domestic domestic}}")
    assert text != EXAMPLE.read_text()
    result = audit(micro("reader"), written(tmp_path, text))
    (field,) = result.fields
    assert any("'foreign' is 1 and 'domestic' 'domestic' is 2 tokens long" in warning for warning in result.warnings)
    assert field.dependence is Dependence.DEPENDS
    assert not field.tokens
    assert not field.sets
    assert field.method("full_downstream").safety is Safety.SAFE
    assert field.method("full_downstream").forward.recovery == pytest.approx(1, abs=1e-3)  # type: ignore[union-attr]
    assert field.method("full_downstream").backward.recovery == pytest.approx(1, abs=1e-3)  # type: ignore[union-attr]
    assert "Edit methods" in audit_page(result)
    assert "Where the notes are" not in audit_page(result)


RULE = "If the parcel origin is foreign, then inspect.\n  Task: decide by the origin.\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt: ''\nanswers: [a, b]", r"prompt is empty"),
        ("prompt: no mark here\nanswers: [a, b]", r"0 marks were found"),
        ("prompt: 'one {{value}} only'\nanswers: [a, b]", r"'\{\{value\}\}' is none: a mark holds two values"),
        ("prompt: 'x {{a|b}}'\nanswers: {old: yes, new: no}", r"answers: YAML reads a bare yes.*quotes"),
        ("prompt: 'x {{a|b}}'\nanswers: {old: keep, new: keep}", r"both answers are 'keep'"),
        ("prompt: 'x {{a|b}}'\nanswer: [a, b]", r"no key 'answer'; did you mean 'answers'"),
        ("prompt: 'x {{a|b}}'", r"the key 'answers' is missing"),
        ("prompt: 'x {{a|b|c}}'\nanswers: [d, e]", r"0 marks were found; '\{\{a\|b\|c\}\}' is none.*no \| or brace"),
        ("prompt: x\ncue: '{{a|b}}'\nanswers: [d, e]", r"that of the cue does not count"),
        ("prompt: 'x {{a|b}}'\nanswers: [c, d]\nanswers: [e, f]", r"line 3: the key 'answers' stands twice"),
        ("name: x\nprompt: order: {{a|b}}", r"line 2 is not valid YAML"),
        ("- a list", r"must hold the keys prompt and answers"),
        ("prompt: '{{a|b}} and {{a|b}}'\nanswers: [c, d]", r"each needs a name"),
        ("prompt: 'x {{a|a}}'\nanswers: [c, d]", r"two different values"),
        ("prompt: 'x {{a|b}}'\nanswers: [c, d]\nerratum: now new", r"no \{value\} in it"),
        ("prompt: 'x {{cue: a|b}}'\nanswers: [c, d]", r"is reserved by kvprobe"),
        (f"prompt: |\n  origin: {{{{foreign|new york}}}}\n  {RULE}answers: [inspect, release]", r"does not know"),
        (
            f"prompt: |\n  origin: {{{{foreign|poor}}}}\n  {RULE}answers: [inspect it, inspect]",
            r"begin with the same token",
        ),
        (f"prompt: |\n  origin: {{{{foreign|poor}}}}\n  {RULE}answers: [inspect, xyzzy]", r"does not know 'xyzzy'"),
        ("prompt: 'origin: {{foreign|poor}}'\nanswers: [inspect, release]\ncue: ''", r"at the very end"),
    ],
)
def test_every_mistake_is_one_sentence_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises((ConfigError, AlignmentError), match=said) as caught:
        make_ready(micro("reader"), read_prompt_file(file), where=str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not re.search(r"[?.][?.]$", str(caught.value))


WORDS = f"origin : {{{{foreign|poor}}}} {RULE.split('.', maxsplit=1)[0]} . Task : decide by the origin .".split()
PIECES = (
    *(
        "{{",
        "}}",
        "|",
        "{{a: foreign|poor}}",
        "{{|}}",
        "{{foreign|foreign}}",
        "{{cue: a|b}}",
        "{{foreign|out of}}",
        "{%",
    ),
    *("\x1b[31m", "[/INST]", "<|im_end|>", "<s>", "<eos>", "日本", "\u202e", "\u2028", "\r\n", "\0", "xyzzy", ""),
)
MARKED = st.lists(st.sampled_from([*PIECES, *WORDS]), max_size=3).flatmap(
    lambda more: st.permutations(more).map(lambda put: " ".join([*WORDS[:4], *put[:1], *WORDS[4:], *put[1:]]))
)
ODD = st.none() | st.integers() | st.booleans() | st.sampled_from(["", *PIECES]) | st.lists(MARKED, max_size=2)


@settings(deadline=None, max_examples=80)
@given(
    MARKED | ODD,
    st.just(["inspect", "release"]) | ODD,
    st.dictionaries(st.sampled_from(["cue", "erratum", "name"]), ODD),
)
def test_any_prompt_is_audited_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, prompt: Any, answers: Any, others: dict[str, Any]
) -> None:
    content = {"prompt": prompt, "answers": answers, **others}
    file = written(tmp_path_factory.getbasetemp(), yaml.safe_dump(content, allow_unicode=True))
    started, told = time.process_time(), str(file)
    try:
        make_ready(micro("reader"), read_prompt_file(file), where=str(file))
    except KvprobeError as error:
        told = str(error)
    assert str(file) in told
    assert "\n" not in told
    assert time.process_time() - started < 1


def test_what_is_not_utf8_is_said(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("prompt: caf\xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match="byte 12 is not UTF-8"):
        read_prompt_file(file)


def test_what_may_not_be_as_meant_is_warned_of(tmp_path: Path) -> None:
    twice = "prompt: |\n  origin: {{foreign|poor}}\n  origin: foreign\n  Frobnicate it.\nanswers: [inspect, release]\n"
    file = written(tmp_path, twice)
    warnings = "\n".join(make_ready(micro("reader"), read_prompt_file(file), where=str(file)).warnings)
    assert "'foreign' of 'origin' also appears in line 2; only the marked occurrence is changed" in warnings
    assert "does not know 2 words of the prompt ('Frobnicate', 'it')" in warnings
    tabbed = twice.replace("Frobnicate it", "then\tinspect").replace("prompt:", "cue: '{{x}} :'\nprompt:")
    file = written(tmp_path, tabbed)
    warnings = "\n".join(make_ready(micro("reader"), read_prompt_file(file), where=str(file)).warnings)
    assert "'\\t'" in warnings
    assert "'{{x}}' is not a mark" in warnings


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'parcel origin'"):
        audit(micro("reader"), EXAMPLE, fields=["parcel orgin"])


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order; collects the names of tags and their attributes."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert not parser.open
    return parser


def test_the_page_is_whole_needs_no_network_and_escapes_what_the_user_wrote() -> None:
    result = audited("note-taker")
    (field,) = result.fields
    evil = "<script>alert(1)</script>\"'"
    tokens = (field.tokens[0].model_copy(update={"text": evil, "segment": evil}), *field.tokens[1:])
    poisoned = field.model_copy(update={"tokens": tokens, "old": evil, "conclusions": (evil,), "name": evil})
    hostile = result.model_copy(update={"fields": (poisoned,), "warnings": (evil,), "prompt": evil})
    for each in (result, hostile):
        html = audit_page(each)
        tags = parsed(html).seen
        assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
        assert not re.search(r"https?://|//[a-z]|url\(", html)
        assert {"viewport", "color-scheme"} <= {attributes.get("name") for tag, attributes in tags if tag == "meta"}
        assert html.count('class="token mark"') == len(field.old_tokens)
    assert parsed(audited("reader")._repr_html_()).seen[0][0] == "div"
    assert audited("reader")._repr_html_() in audit_page(audited("reader"))


def test_the_command_writes_json_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvprobe.models.loader.load_subject", lambda *_, **__: micro("reader"))
    monkeypatch.setattr(package, "audit", lambda *_, **__: audited("reader"))
    runner = CliRunner()
    example = runner.invoke(app, ["audit", "--example"])
    Path("prompt.yaml").write_text(example.output)
    done = runner.invoke(app, ["audit", "prompt.yaml", "--json", "a.json", "--page", "a.html"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert AuditResult.model_validate_json(Path("a.json").read_text()) == audited("reader")
    assert Path("a.html").read_text() == audit_page(audited("reader"))
    assert "✓ field_only *" in done.output
    for arguments, said in (
        (["audit"], "Name a prompt file"),
        (["audit", "none.yaml"], "there is no such file"),
        (["audit", "prompt.yaml", "--page", "no/where.html"], "There is no folder no"),
    ):
        failed = runner.invoke(app, arguments)
        assert failed.exit_code == 1
        assert said in failed.output
    refused = {
        ("--json", "one", "--page", "./one"): "is the other output",
        ("--page", "prompt.yaml"): "is the prompt",
        ("--page", "."): "is a folder",
        ("--json", "/dev/stdout"): "is no ordinary file",
    }
    monkeypatch.setattr(package, "audit", lambda *_, **__: pytest.fail("measured what cannot be written"))
    for outputs, said in refused.items():
        failed = runner.invoke(app, ["audit", "prompt.yaml", *outputs])
        assert failed.exit_code == 1
        assert said in failed.output
    assert Path("prompt.yaml").read_text() == EXAMPLE.read_text()
    assert not Path("one").exists()
    assert "Example: kvprobe audit" in runner.invoke(app, ["audit", "--help"]).output


def test_an_interrupted_audit_says_that_nothing_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvprobe.models.loader.load_subject", interrupted)
    stopped = CliRunner().invoke(app, ["audit", str(EXAMPLE), "--json", str(tmp_path / "a.json")])
    assert (stopped.exit_code, stopped.output) == (130, "Interrupted; nothing was written.\n")


def test_long_values_are_told_by_their_beginning_and_methods_are_explained() -> None:
    result = audited("reader")
    long = "domestic " * 50
    field = conclude(result.fields[0].model_copy(update={"new": long}), 0.5)
    assert f"{long[:59]}…" in field.conclusions[0]
    assert all(len(sentence) < 400 for sentence in field.conclusions)
    html = audit_page(result.model_copy(update={"fields": (field,)}))
    assert long not in html
    assert all(method.what and f"<dd>{escape(method.what)}</dd>" in html for method in field.methods)


def test_progress_runs_from_start_to_end_once(two_methods: None) -> None:
    told: list[float] = []
    audit(micro("reader"), EXAMPLE, progress=lambda stage, fraction: told.append(fraction))
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)


def test_the_top_of_a_failed_audit_is_a_kvprobe_error() -> None:
    with pytest.raises(KvprobeError):
        audit(micro("reader"), EXAMPLE, fields=[])
    assert measure.audit is audit
