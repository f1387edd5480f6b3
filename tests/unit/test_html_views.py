"""What notebooks show: nothing of the user's text is markup, and the coloured tokens are exactly the prompt."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvprobe.edit.context import EditableContext, Field
from kvprobe.edit.readings import Cost, Decision, Seam
from kvprobe.engine.forward import prefill
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError
from kvprobe.html import effect_table, heat_map, html_of, token_map
from kvprobe.html.effects import bar
from kvprobe.html.tokens import MOST_TOKENS
from kvprobe.models.loader import load_subject
from kvprobe.models.subject import Subject
from kvprobe.runs.claims import Claim, Outcome, judge, not_applicable
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.results import ModelResult, RunResult, Status
from kvprobe.stats import Effect, Label
from kvprobe.tasks.context import Context, TokenizedContext, decoded_texts, tokenize
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import align
from kvprobe.tasks.tokenizer import build_tokenizer
from kvprobe.viewing import Viewable
from tests.tiny_models import tiny, tokens

EVIL = "<script>alert('x')</script> & \"</span>"
_VOID = {"meta", "br", "rect", "line", "path"}


class _Page(HTMLParser):
    """Tags in balance, text of the coloured tokens, and what could be fetched or run."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        assert tag != "script"
        assert not {"src", "href", "onload", "onclick", "onerror"} & set(own)
        if "tokens" in (own.get("class") or "").split():
            self.tokens.append([])
        if "token" in (own.get("class") or "").split():
            self.tokens[-1].append("")
        if tag not in _VOID:
            self.open.append((tag, own))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if any("token" in (own.get("class") or "").split() for _, own in self.open):
            self.tokens[-1][-1] += data
        elif self.open[-1][0] != "style":
            self.text += data


def page(shown: Any) -> _Page:
    html = shown if isinstance(shown, str) else shown._repr_html_()
    assert "http" not in html
    assert "url(" not in html
    assert "@import" not in html
    return _Page(html)


def byte_level() -> PreTrainedTokenizerFast:
    """One token for each byte, so that many characters are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({mark: place for place, mark in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers.decoders import ByteLevel

    core.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


TEXTS = {
    "plain": (("system", "You work.\n"), ("field", " pending"), ("task", "\n\tReply.\n"), ("cue", "Answer:")),
    "markup": (("system", EVIL), ("field", " <b>"), ("cue", "</div>:")),
    "characters": (("system", "día 日本 😀\n"), ("field", " ünü"), ("cue", "—:")),
    "blanks": (("system", "  two  blanks  \n\n"), ("field", " x"), ("cue", " :")),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("make", [build_tokenizer, byte_level])
def test_coloured_tokens_are_the_prompt(name: str, make: Any) -> None:
    context = tokenize(Context.of(*TEXTS[name]), make())
    (coloured,) = page(context).tokens
    assert "".join(coloured) == context.text
    assert coloured == context.token_texts()
    assert len(coloured) == len(context.token_ids)


@pytest.mark.parametrize("make", [build_tokenizer, byte_level])
def test_a_segments_tokens_are_its_text(make: Any) -> None:
    context = tokenize(Context.of(*TEXTS["characters"]), make())
    texts = context.token_texts()
    for name, text in TEXTS["characters"]:
        span = context.spans[name]
        assert "".join(texts[span.start : span.end]) == text


@pytest.mark.parametrize("text", ["día 日本 😀 x", "plain words", EVIL])
def test_shares_of_a_decoded_text_are_all_of_it(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    assert "".join(decoded_texts(ids, tokenizer)) == tokenizer.decode(ids) == text


def test_a_context_without_its_source_shows_ids() -> None:
    made = tokenize(Context.of(*TEXTS["plain"]), byte_level())
    bare = TokenizedContext(made.token_ids, made.spans, made.text)
    assert bare == made
    assert page(bare).tokens[0] == [f"⟨{token}⟩" for token in made.token_ids]


def test_a_long_prompt_is_cut_in_the_middle() -> None:
    context = tokenize(Context.of(("system", "a" * (MOST_TOKENS + 50)), ("cue", "b")), byte_level())
    shown = page(context)
    assert len(shown.tokens[0]) == MOST_TOKENS
    assert "51 tokens are left out" in shown.text
    assert shown.tokens[0][-1] == "b"
    assert len(page(token_map(context, np.ones(len(context.token_ids)))).tokens[0]) == MOST_TOKENS


def test_whatever_shows_itself_has_a_view() -> None:
    kinds = Viewable.__subclasses__()
    assert len(kinds) > 10
    for kind in kinds:
        assert html_of.dispatch(kind) is not html_of.dispatch(object), kind
    with pytest.raises(TypeError, match="int has no view"):
        html_of(3)


def test_without_anything_that_draws_the_text_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Viewable, "drawn_by", None)
    assert Receipt()._repr_html_() is None


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("micro-note-taker")


def test_a_pair_marks_what_differs(subject: Subject) -> None:
    pair = align(next(iter(GatedDecision(size=1, wordings=["manual"]).prompt_pairs())), subject.tokenizer)
    html = pair._repr_html_()
    shown = page(pair)
    assert ["".join(coloured) for coloured in shown.tokens] == [pair.base.text, pair.donor.text]
    assert html.count('class="token mark') == 2 * len(pair.field)
    differ = [a != b for a, b in zip(*shown.tokens, strict=True)]
    assert [place for place, other in enumerate(differ) if other] == list(pair.field.positions)
    assert len(repr(pair)) < 200


def test_an_editable_context_shows_state_and_errata(subject: Subject) -> None:
    context = EditableContext.prefill(
        subject,
        [
            "You work at the customs desk.\nSession\nparcel origin:",
            Field("origin", "foreign"),
            "\nPolicy\nIf the parcel origin is foreign, then inspect.\n",
            ("task", "Task: decide by the origin.\n"),
            ("cue", "Answer:"),
        ],
    )
    before = page(context)
    assert "".join(before.tokens[0]) == context.text
    assert "still reads" not in before.text
    cost = context.set("origin", "domestic", method="erratum")
    after = page(context)
    assert "".join(after.tokens[0]) == context.text
    assert "origin still reads foreign" in after.text
    assert context.errata["origin"].strip() in after.text
    assert f"{cost.tokens} of {cost.prompt_tokens} tokens" in page(cost).text
    decision = context.decide(["inspect", "release"])
    assert decision.answer in page(decision).text
    page(context.seam(["inspect", "release"]))


def test_caches_and_forward_passes_say_what_they_hold() -> None:
    result = prefill(tiny("llama"), tokens(9))
    for shown in (result, result.cache):
        text = page(shown).text
        assert "9, 0 to 8" in text
        assert "[1, 2, 9, 8]" in text
        assert "tensor(" not in repr(shown)
    assert f"{result.cache.nbytes / 1000:.3g} kB" in page(result.cache).text
    moved = replace(result.cache, positions=result.cache.positions + 3)
    assert "9 of them moved" in page(moved).text


def test_a_receipts_bar_is_whole() -> None:
    html = Receipt(3, 2, 0, 5, 7_000_000, 0.25)._repr_html_()
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", html)]
    assert sum(widths) == pytest.approx(100)
    assert "7 MFLOP" in page(html).text
    page(Receipt())


def _effect(name: str = "field.recovery", low: float = 0.1, high: float = 0.4, **other: Any) -> Effect:
    inside = min(max(0.25, low), high)
    return Effect(Label.of(name), **{"estimate": inside, "low": low, "high": high, "n": 12, "clusters": 6, **other})


@pytest.mark.parametrize(
    ("low", "high"), [(0.1, 0.4), (-5.0, 9.0), (0.25, 0.25), (-np.inf, 0.3), (0.2, np.inf), (0.0, 0.0)]
)
def test_a_bar_keeps_the_order_of_its_parts(low: float, high: float) -> None:
    drawn = bar(_effect(low=low, high=high, noise_floor=0.01), [_effect(low=-1.0, high=2.0)])
    assert 0 <= drawn["low"] <= drawn["estimate"] <= drawn["low"] + drawn["span"] + 1
    assert drawn["low"] + drawn["span"] <= drawn["width"] + 1
    assert drawn["noise_width"] >= 0
    assert (drawn["open_low"], drawn["open_high"]) == (np.isinf(low), np.isinf(high))


def test_effects_of_one_unit_share_a_scale() -> None:
    effects = [_effect("a.recovery"), _effect("b.recovery", 0.5, 2.0), _effect("c.shift", -30, 50, unit="logits")]
    first, second, _ = (bar(effect, effects) for effect in effects)
    assert first["marks"] == second["marks"]
    assert first["low"] < second["low"]


def test_an_effect_shows_all_that_it_carries() -> None:
    effect = _effect(EVIL, excluded=2, noise_floor=0.03, unit="<u>", method="range")
    text = page(effect).text
    for part in (EVIL, "0.250", "0.100", "0.400", "12", "6", "2", "0.030", "<u>", "range"):
        assert part in text
    table = effect_table({"m/<i>": [effect, _effect("other.flip_rate")]}, only="script")
    assert "other.flip_rate" not in page(table).text
    assert EVIL in repr(table)


def _result(tmp_path: Any) -> RunResult:
    claims = [Claim(id=EVIL, statement="field.recovery < 0.15"), Claim(id="second", statement="field.recovery > 0.05")]
    config = ExperimentConfig(
        name="own", question=EVIL, probe="locality", models=["a", "b"], task={"name": "gated_decision"}, claims=claims
    )
    models = {
        "a": ModelResult("a", Status.MEASURED, "It <decides>.", effects=(_effect(),)),
        "b": ModelResult("b", Status.NOT_APPLICABLE, EVIL),
    }
    verdicts = [judge(claim, "a", models["a"].effects) for claim in claims]
    verdicts += [not_applicable(claim, "b", EVIL) for claim in claims]
    return RunResult(config, "0" * 64, tmp_path, models, tuple(verdicts))


def test_a_run_shows_every_verdict_once(tmp_path: Any) -> None:
    result = _result(tmp_path)
    html, text = result._repr_html_(), page(result).text
    assert html.count('class="outcome"') == len(result.verdicts) == 4
    for outcome in (Outcome.OPEN, Outcome.HOLDS, Outcome.NOT_APPLICABLE):
        assert str(outcome) in text
    assert text.count(EVIL) == 3  # question, claim, reason
    assert len(repr(result).splitlines()) == 5
    for verdict in result.verdicts:
        assert verdict.reason in page(verdict).text
    for model in result.models.values():
        assert model.reason in page(model).text
    page(replace(result, verdicts=(), models={}))


def test_decisions_escape_their_answers() -> None:
    decision = Decision(EVIL, {EVIL: -0.1, "<b>": -3.0}, "<i>")
    assert EVIL in page(decision).text
    assert EVIL in page(Seam(decision, decision, 0.0)).text
    assert EVIL in page(Cost(EVIL, Receipt(1, 0, 0, 1), 2)).text


def test_a_token_map_colours_by_sign_and_size() -> None:
    shown = token_map(["a", EVIL, "", "d"], [-2.0, 1.0, 0.0, np.nan], unit="<logits>")
    assert "".join(page(shown).tokens[0]) == f"a{EVIL}d"
    colours = re.findall(r'class="token"(?: style="background:rgba\(([^)]*)\)")?', shown.html)
    opacity = [float(colour.split(",")[3]) if colour else None for colour in colours]
    assert opacity[0] == pytest.approx(2 * opacity[1], abs=1e-3)
    assert opacity[2:] == [0, None]
    assert colours[0].split(",")[:3] != colours[1].split(",")[:3]
    assert "at 0: -2" in repr(shown)


@pytest.mark.parametrize("values", [[1.0], np.ones((2, 2)), []])
def test_values_must_fit_the_tokens(values: Any) -> None:
    with pytest.raises(ConfigError, match="needs"):
        token_map(["a", "b", "c"], values)
    with pytest.raises(ConfigError, match="needs"):
        heat_map(["a", "b", "c"], values)


def test_a_heat_map_holds_the_values_where_they_belong() -> None:
    context = tokenize(Context.of(*TEXTS["markup"]), byte_level())
    values = torch.arange(2.0 * len(context.token_ids)).reshape(2, -1)
    figure = heat_map(context, values, unit="<u>", title="<b>")
    (cells,) = figure.data
    assert np.array_equal(cells.z, values.numpy())
    assert cells.zmax == -cells.zmin == float(values.max())
    assert len(cells.x) == len(context.token_ids)
    assert cells.customdata.shape == (2, len(context.token_ids), 2)
    assert "field" in cells.customdata[0, context.spans["field"].start, 1]
    assert not any("<" in label for label in [*cells.customdata[0, :, 0], figure.layout.title.text])
    assert "<u>" not in cells.hovertemplate
    assert list(heat_map(context, values[:, 3:5], positions=[3, 4]).data[0].z[1]) == values[1, 3:5].tolist()
    assert heat_map(["a", "b"], [np.nan, np.nan]).data[0].zmax == 1
    with pytest.raises(ConfigError, match="no position 99"):
        heat_map(context, [1.0], positions=[99])


def test_a_wide_heat_map_labels_what_stands_out() -> None:
    values = np.zeros((2, 100))
    values[0, 70], values[1, 3], values[0, 5] = 1.0, -0.5, 0.05
    axis = heat_map([f"t{column}" for column in range(100)], values).layout.xaxis
    assert list(axis.tickvals) == [3, 70]
    assert list(axis.ticktext) == ["t3", "t70"]
