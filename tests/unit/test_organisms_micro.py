"""Micro-models do what their documentation says: every head, position and layer, by plain Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvprobe.errors import ConfigError, UnknownNameError
from kvprobe.models import micro
from kvprobe.models.loader import load_subject
from kvprobe.models.micro import KINDS, micro_weights, note_positions, word_codes
from kvprobe.models.subject import Subject
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, align


@cache
def subject(kind: str) -> Subject:
    return load_subject(f"micro-{kind}", dtype=torch.float64, device="cpu", attention="eager")


@cache
def light(kind: str) -> Subject:
    return load_subject(f"micro-{kind}", device="cpu")


def pairs(size: int = 40, **changes: object) -> Iterator[Pair]:
    task = GatedDecision(size=size, wordings=("manual",), **changes)  # type: ignore[arg-type]
    return (align(pair, subject("reader").tokenizer) for pair in task.prompt_pairs())


def run(kind: str, ids: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Logits at the last token, and attention by layer `[head, query, key]`."""
    with torch.no_grad():
        output = subject(kind).model(torch.tensor([ids]), output_attentions=True)
    return output.logits[0, -1], [layer[0] for layer in output.attentions]


def logits_of(kind: str, ids: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = light(kind).model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
    return logits


def margins(kind: str, pair: Pair) -> tuple[float, float]:
    both = (logits_of(kind, context.token_ids) for context in (pair.base, pair.donor))
    base, donor = (float(logits[pair.donor_answer_id] - logits[pair.base_answer_id]) for logits in both)
    return base, donor


def attended(attention: list[Tensor], head: tuple[int, int], query: int) -> tuple[int, float]:
    """Where a head looks most, and how much."""
    weights = attention[head[0]][head[1], query]
    return int(weights.argmax()), float(weights.max())


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("rule", ["cases", "trigger"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_decision_is_right_and_sure(kind: str, rule: str, split: str) -> None:
    for pair in pairs(size=10, rules=(rule,), split=split):
        base, donor = margins(kind, pair)
        assert base < -10
        assert donor > 10


def test_the_value_of_another_field_is_no_distraction() -> None:
    """The session's first line holds the donor's value too, for another field."""
    for pair in pairs(size=8, other_fields=(1, 2)):
        value = pair.donor.token_ids[pair.field.start]
        colon = subject("reader").tokenizer.convert_tokens_to_ids(":")
        ids = list(pair.base.token_ids)
        others = [p for p in range(8, pair.field.start + 9) if ids[p - 1] == colon and p != pair.field.start]
        if not others:
            continue
        ids[others[0]] = value
        for kind in ("note-taker", "reader"):
            logits = logits_of(kind, tuple(ids))
            assert logits[pair.base_answer_id] > logits[pair.donor_answer_id] + 10


def test_only_reading_at_the_decision_survives_a_field_that_comes_after_the_rule() -> None:
    for pair in pairs(size=6, field_slots=("after_policy", "end")):
        note_taker, reader = margins("note-taker", pair), margins("reader", pair)
        assert max(map(abs, note_taker)) < 0.05
        assert reader[0] < -10 < 10 < reader[1]


def test_notes_are_taken_at_the_full_stop_of_the_case_that_holds_and_read_there() -> None:
    tokenizer = subject("note-taker").tokenizer
    for pair in pairs(size=4):
        for context, answer in ((pair.base, pair.base_answer_id), (pair.donor, pair.donor_answer_id)):
            attention = run("note-taker", context.token_ids)[1]
            stops = note_positions(context, tokenizer)
            assert len(stops) == 2
            for stop in stops:
                holds = context.token_ids[stop - 4] == context.token_ids[pair.field.start]
                where, weight = attended(attention, micro.NOTE_WRITER, stop)
                assert where == (pair.field.start if holds else 0)
                assert weight > 0.99
                if holds:
                    assert context.token_ids[stop - 1] == answer
                    read_at, weight = attended(attention, micro.NOTE_READER, pair.decision_position)
                    assert read_at == stop
                    # A note adds NOTE_STRENGTH nats to one of two cases: the odds of reading the right one.
                    assert weight == pytest.approx(1 / (1 + math.exp(-micro.NOTE_STRENGTH)), abs=0.003)


def test_a_reader_fetches_name_value_and_case_at_the_decision() -> None:
    for pair in pairs(size=4):
        ids = pair.base.token_ids
        attention = run("reader", ids)[1]
        name, _ = attended(attention, micro.NAME_READER, pair.decision_position)
        assert ids[name] == ids[pair.field.start - 2]
        assert pair.base.segment_of(name) == "task"
        assert attended(attention, micro.FIELD_READER, pair.decision_position)[0] == pair.field.start
        stop, weight = attended(attention, micro.RULE_READER, pair.decision_position)
        assert ids[stop - 4] == ids[pair.field.start]
        assert ids[stop - 1] == pair.base_answer_id
        assert weight > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_cached_entries_differ_only_where_the_documentation_says(kind: str) -> None:
    """Keys and values of base and donor prompt: notes stand on the full stops, in layer 3's keys, and only there."""
    (pair,) = pairs(size=1)
    model = subject(kind).model
    with torch.no_grad():
        base, donor = (model(torch.tensor([c.token_ids])).past_key_values for c in (pair.base, pair.donor))
    stops = set(note_positions(pair.base, subject(kind).tokenizer))
    takes_notes = kind != "reader"
    for layer in range(micro.LAYERS):
        ours, theirs = base.layers[layer], donor.layers[layer]
        keys = (ours.keys - theirs.keys).abs().amax((0, 1, 3))
        changed = {position for position in range(pair.decision_position) if keys[position] > 0.05}
        assert (stops <= changed) == (takes_notes and kind != "unread-notes" and layer == 3)
        if layer == 0:
            assert {int(p) for p in ((ours.values - theirs.values).abs().amax((0, 1, 3)) > 0.05).nonzero()} == {
                pair.field.start
            }


def test_mlps_add_nothing_and_norms_are_nearly_the_identity() -> None:
    (pair,) = pairs(size=1)
    model = subject("both").model
    seen: list[Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(
            lambda _, given, made: seen.append((made - given[0]).norm(dim=-1) / given[0].norm(dim=-1))
        )
        for layer in model.model.layers
    ]
    hooks += [
        layer.mlp.register_forward_hook(lambda _, given, made: seen.append(made.abs().amax(-1)))
        for layer in model.model.layers
    ]
    try:
        with torch.no_grad():
            model(torch.tensor([pair.base.token_ids]))
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == 2 * micro.LAYERS
    assert max(float(change.max()) for change in seen[::2]) < 0.006
    assert all(not bool(added.any()) for added in seen[1::2])


@given(count=st.integers(2, 529))
def test_codes_hardly_overlap(count: int) -> None:
    codes = word_codes(count)
    overlaps = codes @ codes.T
    assert torch.allclose(overlaps.diagonal(), torch.ones(count, dtype=codes.dtype))
    assert float(overlaps.fill_diagonal_(0).abs().max()) <= 23**-0.5 + 1e-12


def test_there_are_only_so_many_codes() -> None:
    with pytest.raises(ConfigError, match="529 codes"):
        word_codes(530)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'note-taker'"):
        micro_weights("notetaker", {})


def test_identity_tells_kinds_and_not_dtypes_apart() -> None:
    hashes = {kind: subject(kind).identity.weights_sha256 for kind in KINDS}
    assert len(set(hashes.values())) == len(KINDS)
    single = load_subject("micro-reader", device="cpu")
    assert single.identity.weights_sha256 == hashes["reader"]
    assert (single.identity.dtype, single.identity.attention) == ("float32", "sdpa")


def test_looking_back_has_one_peak_in_two_thousand_tokens() -> None:
    """The score of a head that looks one place back, for keys everywhere: cosines of the RoPE angles, by hand."""
    distances = torch.arange(-3, 2000, dtype=torch.float64)
    frequency = [1e38 ** (-pair / 64) for pair in range(len(micro._TURNING))]
    score = sum(nats * (turn * (distances - 1)).cos() for nats, turn in zip(micro._TURNING, frequency, strict=True))
    assert isinstance(score, Tensor)
    best, second = score.topk(2).values
    assert distances[score.argmax()] == 1
    assert float(best) == pytest.approx(64)
    assert float(best - second) > 8
