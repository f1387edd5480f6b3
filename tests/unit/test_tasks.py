"""Contexts, pairs, the scenario library and the gated decision."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvprobe.errors import AlignmentError, ConfigError, UnknownNameError
from kvprobe.tasks.answers import answer_token
from kvprobe.tasks.base import TASKS
from kvprobe.tasks.chat import chat_wrapped
from kvprobe.tasks.context import Context, encode_segment, tokenize
from kvprobe.tasks.gated import GatedScenario, Layout, render
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import filler_notes, skeletons
from kvprobe.tasks.own_prompt import OwnPrompt
from kvprobe.tasks.pairs import PromptPair, Provenance, align
from kvprobe.tasks.tokenizer import build_tokenizer, words
from kvprobe.tasks.wordings import TRAINED
from kvprobe.tasks.worked_cases import with_worked_cases, worked_cases

TOKENIZER = build_tokenizer()
SCENARIO = GatedScenario(
    "shipping", "order", "status", ("pending", "shipped"), ("cancel", "deny"), "please stop my order"
)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a blank before a text that stands alone, and one token a character."""
    alphabet = {character: index for index, character in enumerate("<\u2581abcdefghijklmnopqrstuvwxyz.:\n|?")}
    core = Tokenizer(models.BPE(alphabet, [], unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")


def pair_of(base: Context, donor: Context, answers: tuple[str, str] = ("cancel", "deny")) -> PromptPair:
    return PromptPair(base, donor, *answers, Provenance("s", "w", 0))


def test_spans_cover_the_tokens_without_gap_and_decode_to_their_segments() -> None:
    for wording in TRAINED:
        context = render(SCENARIO, "pending", wording, Layout(notes_after=filler_notes()[:2]))
        tokenized = tokenize(context, TOKENIZER)
        edges = list(tokenized.spans.values())
        assert edges[0].start == 1
        assert tokenized.token_ids[0] == TOKENIZER.bos_token_id
        assert TOKENIZER.bos_token_id not in tokenized.token_ids[1:]
        assert edges[-1].end == len(tokenized.token_ids)
        assert all(left.end == right.start for left, right in pairwise(edges))
        for segment in context.segments:
            span = tokenized.spans[segment.name]
            pieces = TOKENIZER.convert_ids_to_tokens(tokenized.token_ids[span.start : span.end])
            assert pieces == words(segment.text)
            assert {tokenized.segment_of(position) for position in span.positions} == {segment.name}


def test_a_segment_is_encoded_as_in_the_middle_of_a_text() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    alone = tokenizer.convert_ids_to_tokens(tokenizer.encode("ab"))
    inside = tokenizer.convert_ids_to_tokens(encode_segment("ab", tokenizer))
    assert alone[0] == "\u2581"
    assert inside == ["a", "b"]


@given(value=st.sampled_from(["pending", "returned", "gold"]), wording=st.sampled_from(["manual", "memo", "dialogue"]))
def test_tokens_outside_the_field_never_depend_on_it(value: str, wording: str) -> None:
    ours = tokenize(render(SCENARIO, "shipped", wording, Layout()), TOKENIZER)
    theirs = tokenize(render(SCENARIO, value, wording, Layout()), TOKENIZER)
    span = ours.spans["field"]
    assert theirs.spans == ours.spans
    assert ours.token_ids[: span.start] == theirs.token_ids[: span.start]
    assert ours.token_ids[span.end :] == theirs.token_ids[span.end :]


def test_repeated_segment_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unique"):
        Context.of(("field", "a"), ("field", "b"))


@pytest.mark.parametrize(
    ("base", "donor", "said"),
    [
        ([("field", " pending")], [("field", " pending shipped")], "'pending' 'shipped' is 2"),
        ([("field", " pending")], [("field", " pending")], "same tokens"),
        (
            [("field", " pending"), ("cue", "\nAnswer:")],
            [("field", " shipped"), ("cue", "\nTask:")],
            "'Answer' ':' against 'Task'",
        ),
        ([("session", "order")], [("session", "order")], "no segment named 'field'"),
    ],
)
def test_unaligned_pairs_are_refused_and_the_tokens_shown(base, donor, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AlignmentError, match=said):
        align(pair_of(Context.of(*base), Context.of(*donor)), TOKENIZER)


CUE = TOKENIZER.encode("Answer:", add_special_tokens=False)


def test_answers_must_be_single_tokens_of_their_own() -> None:
    with pytest.raises(AlignmentError, match="3 tokens"):
        answer_token("order status pending", [], CUE, TOKENIZER)
    with pytest.raises(AlignmentError, match="same token"):
        answer_token("cancel", ["cancel deny"], CUE, TOKENIZER)


def test_the_library_is_large_balanced_and_free_of_leaks() -> None:
    every = skeletons()
    assert len(every) >= 40
    assert len(skeletons("held_out")) >= 30
    assert set(skeletons("held_out")).isdisjoint(skeletons("train"))
    assert len({skeleton.name for skeleton in every}) == len(every)
    decisive = {word for skeleton in every for word in (*skeleton.values, *skeleton.actions)}
    neutral = {word for note in filler_notes() for word in words(note)}
    # A value or an action inside the filler would give the decision away or disturb it.
    assert not decisive & neutral
    for skeleton in every:
        request = set(words(skeleton.request))
        assert not request & ({*skeleton.values} | {*skeleton.actions}), skeleton.name


def test_the_gated_decision_visits_skeletons_and_wordings_evenly_and_is_reproducible() -> None:
    task = GatedDecision(size=90)
    pairs = list(task.prompt_pairs())
    assert set(Counter(pair.scenario.skeleton for pair in pairs).values()) == {3}
    assert len({(pair.scenario.skeleton, pair.scenario.wording) for pair in pairs}) == 90
    assert pairs == list(task.prompt_pairs())
    assert pairs[:30] == list(GatedDecision(size=30).prompt_pairs())
    assert pairs != list(GatedDecision(size=90, seed=1).prompt_pairs())


def test_answer_order_and_polarity_are_balanced() -> None:
    pairs = list(GatedDecision(size=600).prompt_pairs())
    first_offered = sum(
        pair.base.text.index(f"with {pair.base_answer} ") > 0
        for pair in pairs
        if f"with {pair.base_answer} " in pair.base.text
    )
    by_library = {skeleton.name: skeleton.actions for skeleton in skeletons()}
    natural = sum(by_library[pair.scenario.skeleton][0] == pair.base_answer for pair in pairs)
    assert 240 < first_offered < 360
    assert 240 < natural < 360


def test_every_pair_aligns_with_the_organisms_tokenizer_and_has_no_unknown_word() -> None:
    for rules in (("cases",), ("trigger",)):
        for mode in ("direct", "think"):
            task = GatedDecision(
                size=60, rules=rules, mode=mode, field_slots=("start", "after_policy", "after_filler", "end")
            )
            for prompt_pair in task.prompt_pairs():
                pair = align(prompt_pair, TOKENIZER)
                assert len(pair.base.token_ids) == len(pair.donor.token_ids)
                assert TOKENIZER.unk_token_id not in pair.base.token_ids
                assert pair.downstream.start == pair.field.end
                assert pair.downstream.end == pair.decision_position
                assert pair.reversed().reversed() == pair


def test_the_rule_decides_as_the_answers_say() -> None:
    """An independent reading of the rendered rule gives the answers that the pair declares."""
    for pair in GatedDecision(size=120, wordings=("memo",), rules=("cases", "trigger")).prompt_pairs():
        for context, answer in ((pair.base, pair.base_answer), (pair.donor, pair.donor_answer)):
            value = next(s.text.strip() for s in context.segments if s.name == "field")
            policy = next(s.text for s in context.segments if s.name == "policy")
            stated = (line.partition(" means ") for line in policy.splitlines()[1:])
            clauses = {left.split(" = ")[-1]: right.rstrip(".\n") for left, _, right in stated}
            assert clauses.get(value, clauses.get("all else")) == answer


def test_unknown_names_and_parameters_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="manual"):
        GatedDecision(wordings=("manuel",))
    with pytest.raises(UnknownNameError, match="gated_decision"):
        TASKS.get("gated_decison")
    with pytest.raises(ValueError, match="Extra inputs"):
        GatedDecision(sise=3)  # type: ignore[call-arg]


class TestChatTemplates:
    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = "{{ bos_token }}User: {{ messages[0]['content'] }}\nAssistant:\n"
        return tokenizer

    def test_bos_comes_once_and_the_cue_last(self) -> None:
        tokenizer = self.tokenizer()
        context = render(SCENARIO, "pending", "memo", Layout())
        wrapped = chat_wrapped(context, tokenizer)
        ids = tokenize(wrapped, tokenizer).token_ids
        assert ids.count(tokenizer.bos_token_id) == 1
        assert [segment.name for segment in wrapped.segments][-2:] == ["chat_middle", "cue"]
        reference = tokenizer.apply_chat_template(
            [{"role": "user", "content": context.text.removesuffix("Answer:")}],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert wrapped.text == reference + "Answer:"

    def test_worked_cases_are_turns_before_the_prompt_and_alike_for_all_pairs(self) -> None:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = (
            "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:\n"
        )
        task = GatedDecision(size=6, wordings=("memo",), skeletons=("order_status",), split="all")
        plain = list(task.prompt_pairs())
        told = with_worked_cases(task, plain, 3)
        pairs = [align(pair, tokenizer, chat={}) for pair in told]
        assert len({pair.shared_prefix for pair in pairs}) == 1
        for pair, alone in zip(pairs, plain, strict=True):
            whole = chat_wrapped(alone.donor, tokenizer).text.removeprefix(tokenizer.bos_token)
            assert pair.donor.text.endswith(whole)
            assert pair.donor.token_ids[: len(pair.shared_prefix)] == pair.shared_prefix
            assert len(pair.shared_prefix) < pair.donor.spans["chat_prefix"].start + 1
        without_template = align(told[0], TOKENIZER, chat={}).base
        assert (
            without_template.text
            == "".join(f"{user}{said}\n\n" for user, said in told[0].base.turns) + plain[0].base.text
        )

    def test_worked_cases_are_of_other_skeletons_decided_rightly_and_balanced(self) -> None:
        scored = tuple(skeleton.name for skeleton in skeletons("train"))[:5]
        turns = worked_cases(GatedDecision(wordings=("memo",), skeletons=scored, split="train"), "memo", 4)
        fields = {skeleton.field for skeleton in skeletons("train") if skeleton.name in scored}
        first = Counter()
        for user, said in turns:
            asked = user.split("decide by the ")[1].split(".")[0]
            assert asked not in fields
            value = next(line for line in user.splitlines() if f" {asked} = " in line).split(" = ")[1].rstrip(";")
            rule = {
                line.split(" = ")[1].split(" means ")[0]: line.split(" means ")[1]
                for line in user.splitlines()
                if " means " in line
            }
            answer = said.removeprefix("Answer: ")
            assert rule[value] == f"{answer}."
            first[answer == user.split("Reply with ")[1].split(" or ")[0]] += 1
        assert first[True] == first[False] == 4
        with pytest.raises(ConfigError, match="only 5 skeletons"):
            worked_cases(GatedDecision(skeletons=scored, split="train"), "memo", 20)

    def test_a_tokenizer_without_template_leaves_the_context_alone(self) -> None:
        context = render(SCENARIO, "pending", "memo", Layout())
        assert chat_wrapped(context, TOKENIZER) == context


class TestOwnPrompt:
    def write(self, tmp_path, prompt: str, extra: str = "") -> OwnPrompt:  # type: ignore[no-untyped-def]
        path = tmp_path / "mine.yaml"
        indented = "\n".join("  " + line for line in prompt.splitlines())
        path.write_text(f"name: mine\nprompt: |\n{indented}\nanswers: {{old: cancel, new: deny}}\n{extra}")
        return OwnPrompt(files=(path,))

    def test_a_marked_field_becomes_an_aligned_pair(self, tmp_path) -> None:  # type: ignore[no-untyped-def]
        task = self.write(tmp_path, "order status: {{pending|shipped}}\nIf the order status is pending, then cancel.")
        pair = align(next(iter(task.prompt_pairs())), TOKENIZER)
        assert TOKENIZER.decode(pair.base.token_ids[pair.field.start : pair.field.end]) == "pending"
        assert TOKENIZER.decode(pair.donor.token_ids[pair.field.start : pair.field.end]) == "shipped"
        assert next(iter(task.prompt_pairs())).base.text.endswith("then cancel.\nAnswer:")

    @pytest.mark.parametrize(
        ("prompt", "extra", "said"),
        [
            ("no mark at all", "", "0 marks"),
            ("{{a|b}} and {{a|b}}", "", "2 marks"),
            ("{{a|b}}", "anwsers: 3", "anwsers"),
        ],
    )
    def test_a_bad_file_is_named_with_its_key(self, tmp_path, prompt: str, extra: str, said: str) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(ConfigError, match=said) as caught:
            list(self.write(tmp_path, prompt, extra).prompt_pairs())
        assert "mine.yaml" in str(caught.value)

    def test_a_missing_file_is_one_sentence(self, tmp_path) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(ConfigError, match="no such file"):
            list(OwnPrompt(files=(tmp_path / "none.yaml",)).prompt_pairs())


def test_randomness_is_local() -> None:
    random.seed(3)
    before = random.getstate()
    list(GatedDecision(size=5).prompt_pairs())
    assert random.getstate() == before
