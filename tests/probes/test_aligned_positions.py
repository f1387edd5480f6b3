"""Slots name the same place in prompts of other words, orders and lengths."""

from __future__ import annotations

import pytest
from worded_models import TOKENIZER

from kvprobe.probes.kit.aligned_positions import Slot, ranked, slot_scores, slots
from kvprobe.probes.kit.depth import layer_bands, layer_thirds
from kvprobe.tasks.encoding import is_delimiter
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, align


def pairs_of(size: int) -> list[Pair]:
    return [align(pair, TOKENIZER) for pair in GatedDecision(size=size).prompt_pairs()]


def test_an_action_has_the_same_slot_in_every_prompt() -> None:
    for pair in pairs_of(30):
        places = slots(pair)
        policy = pair.base.spans["policy"]
        for answer, anchor in ((pair.base_answer_id, "base action"), (pair.donor_answer_id, "donor action")):
            (position,) = (p for p in policy.positions if pair.base.token_ids[p] == answer)
            assert places[position] == Slot("policy", anchor, 0)
            if position + 1 in policy.positions:
                assert places[position + 1] == Slot("policy", anchor, 1)


def test_every_position_has_a_slot_in_its_own_segment() -> None:
    (pair,) = pairs_of(1)
    places = slots(pair)
    assert len(places) == len(pair.base.token_ids)
    assert [place.segment for place in places] == [pair.base.segment_of(p) for p in range(len(places))]
    assert places[pair.decision_position].offset == -1
    assert places[pair.field.start].segment == "field"


def test_base_and_donor_trade_places_in_the_reversed_pair() -> None:
    (pair,) = pairs_of(1)
    trade = {"base": "donor", "donor": "base"}
    for here, there in zip(slots(pair), slots(pair.reversed()), strict=True):
        kind, _, rest = here.anchor.partition(" ")
        assert there.anchor == (f"{trade[kind]} {rest}" if kind in trade else here.anchor)
        assert (there.segment, there.offset) == (here.segment, here.offset)


def test_scores_are_ratios_of_sums_and_zero_for_the_unseen() -> None:
    here, there = Slot("policy", "donor action", 1), Slot("task", "end", -1)
    score = slot_scores([([here, there], {0: 2.0, 1: 0.0}, 4.0), ([here], {0: 1.0}, 2.0)])
    assert score(here) == pytest.approx(0.5)
    assert score(there) == 0.0
    assert score(Slot("cue", "end", -1)) == 0.0


def test_ranking_is_by_score_then_from_the_end() -> None:
    assert ranked([1, 2, 3, 4], {1: 0.5, 2: 0.9, 3: 0.5, 4: 0.0}.__getitem__) == [2, 3, 1, 4]


@pytest.mark.parametrize(
    ("text", "expected"), [(".", True), (":", True), ("\n", True), ("policy", False), ("if", False)]
)
def test_delimiters(text: str, expected: bool) -> None:
    assert is_delimiter(TOKENIZER.encode(text, add_special_tokens=False)[-1], TOKENIZER) is expected


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 32])
def test_thirds_hold_every_layer_once_and_bands_end_in_all_of_them(count: int) -> None:
    held = [layer for layers in layer_thirds(count).values() for layer in layers]
    assert held == list(range(count))
    bands = layer_bands(count)
    assert bands[f"up_to_layer_{count - 1}"] == bands["from_layer_0"] == tuple(range(count))
    assert all(bands.values())
