"""Probes of the cache on models whose answer is known: a note-taker, a reader, both at once, notes that nobody reads.

Worked out from `kvprobe.models.micro`. The decision reads two full stops, those of the rule's two cases, through
keys of layer 3. A note raises its full stop's score; with a note on both or on neither, both actions are equally
likely and the margin is 0, half way from base to donor. So every full stop from the donor's cache recovers one half,
in layer 3 alone, and nothing else recovers anything. For a reader all of it is the field's value, in layer 2.
"""

from __future__ import annotations

import math

import pytest
from micro_runs import MicroRun, micro_run, notes_of

from kvprobe.models import micro
from kvprobe.probes.mechanism.scrub.hypotheses import ARMS
from kvprobe.runs.claims import Outcome
from kvprobe.tasks.pairs import Pair

HOLDS, FAILS = Outcome.HOLDS, Outcome.FAILS
READ_IN = {"note-taker": 3, "reader": 2}
EXACT = 2e-3  # softmax and RMS norm leak a little
HEADS = micro.LAYERS * micro.HEADS


def span(pair: Pair) -> list[int]:
    """Positions from the field on, in order."""
    return list(range(pair.field.start, pair.decision_position))


def carried(kind: str, pair: Pair, positions: list[int]) -> float:
    """The share of the effect that lies at some positions."""
    if kind == "reader":
        return float(pair.field.start in positions)
    return len(set(notes_of(pair)) & set(positions)) / 2


def expected(run: MicroRun, kind: str, choose: object) -> float:
    """Recovery of the positions that `choose` takes from each pair."""
    return run.mean_over_gaps([carried(kind, pair, choose(pair)) for pair in run.pairs])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "field", "rest"), [("note-taker", 0, 1), ("reader", 1, 0), ("both", 0.5, 0.5), ("unread-notes", 1, 0)]
)
def test_locality(kind: str, field: float, rest: float) -> None:
    run = micro_run("locality", kind, 12)
    assert run.estimate("field_only.recovery") == pytest.approx(field, abs=EXACT)
    assert run.estimate("downstream_only.recovery") == pytest.approx(rest, abs=EXACT)
    assert run.estimate("shapley_field.recovery") == pytest.approx(field, abs=EXACT)
    assert run.estimate("interaction.recovery") == pytest.approx(0, abs=EXACT)
    if kind != "both":
        outcome = HOLDS if kind == "note-taker" else FAILS
        assert run.verdict("field-alone-does-nothing") == outcome
        assert run.verdict("downstream-carries-the-effect") == outcome


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_suffix_concentration(kind: str) -> None:
    run = micro_run(
        "suffix_concentration", kind, 8, random_draws=2, matched_draws=2, fractions=(0.05, 0.3, 0.5, 0.7, 0.9, 1.0)
    )
    for percent in (5, 30, 50, 70, 90, 100):
        for name, part in (("suffix", slice(None, None, -1)), ("prefix", slice(None))):

            def first(pair: Pair, percent: int = percent, order: slice = part) -> list[int]:
                ordered = span(pair)[order]
                return ordered[: math.ceil(percent * len(ordered) / 100 - 1e-9)]

            assert run.estimate(f"{name}_{percent}.recovery") == pytest.approx(expected(run, kind, first), abs=EXACT)
    for layer in range(micro.LAYERS):
        assert run.estimate(f"layer_{layer}.recovery") == pytest.approx(float(layer == READ_IN[kind]), abs=EXACT)
    notes = kind == "note-taker"
    assert run.estimate("mass.policy") == pytest.approx(float(notes), abs=EXACT)
    assert run.estimate("mass.field") == pytest.approx(float(not notes), abs=EXACT)
    assert run.estimate("delimiter.share") == pytest.approx(float(notes), abs=EXACT)
    assert run.verdict("the-field-holds-next-to-nothing") == (HOLDS if notes else FAILS)
    assert run.verdict("delimiters-hold-more-than-their-share") == (HOLDS if notes else FAILS)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_specificity(kind: str) -> None:
    """Two positions carry all that the notes carry, and other skeletons tell which; a reader has none."""
    run = micro_run("specificity", kind, 8, matched_draws=5, random_draws=40, sizes=(1, 2, 8))
    whole = float(kind == "note-taker")
    for selection in ("in_sample", "held_out"):
        for size in (1, 2, 8):
            found = run.estimate(f"{selection}_{size}.recovery")
            assert found == pytest.approx(whole * min(size, 2) / 2, abs=EXACT)
    # Of n positions after the field, eight drawn at random hold each note with probability 8 / n.
    by_chance = run.mean_over_gaps([8 / len(pair.downstream) for pair in run.pairs])
    assert run.estimate("random_8.recovery") == pytest.approx(whole * by_chance, abs=0.05)
    assert run.estimate("matched_8.recovery") < max(0.5 * whole, EXACT)
    assert run.verdict("held-out-beats-matched-sets") == (HOLDS if whole else FAILS)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_injection(kind: str) -> None:
    run = micro_run("injection", kind, 8, random_draws=2, sizes=(1, 2))
    whole = float(kind == "note-taker")
    assert run.estimate("all_notes.recovery") == pytest.approx(whole, abs=EXACT)
    assert run.estimate("held_out_1.recovery") == pytest.approx(whole / 2, abs=EXACT)
    assert run.estimate("held_out_2.recovery") == pytest.approx(whole, abs=EXACT)
    assert run.estimate("all_notes.flip_rate") == whole
    assert run.verdict("margin-follows-the-notes") == (HOLDS if whole else FAILS)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_attention_attribution(kind: str) -> None:
    """Each head pays a mass of one, and masses are means over heads and layers.

    Idle heads look everywhere alike: 9 of 16 in a note-taker and 8 in a reader. Heads that find nothing at the
    decision look at the start: 3 that look back in layer 0, 1 in layer 1, and the note-taker's writer.
    """
    run = micro_run("attention_attribution", kind, 6)
    idle = {"note-taker": 9, "reader": 8}[kind]
    lengths = [len(pair.base.token_ids) for pair in run.pairs]
    everywhere = sum(idle / length for length in lengths) / len(lengths) / HEADS
    notes = kind == "note-taker"
    assert run.estimate("mass.field") == pytest.approx(everywhere + (not notes) / HEADS, abs=EXACT)
    assert run.estimate("mass.sink") == pytest.approx(3 * everywhere + (4 + notes) / HEADS, abs=EXACT)
    in_policy = sum(len(pair.base.spans["policy"]) * idle / len(pair.base.token_ids) for pair in run.pairs)
    assert run.estimate("mass.policy") == pytest.approx((in_policy / len(run.pairs) + 1) / HEADS, abs=EXACT)
    assert run.verdict("the-field-is-hardly-looked-at") == (HOLDS if notes else FAILS)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_knockout(kind: str) -> None:
    """With both full stops hidden a note-taker has no preference, whatever the field says."""
    run = micro_run("knockout", kind, 10, draws=4, fractions=(0.25, 1.0))
    notes = kind == "note-taker"
    assert run.estimate("none.field_only.follows_new") == (not notes)
    # Everything after the field holds the rule itself, so nobody can decide without it.
    assert run.estimate("all_layers.erased") == pytest.approx(1, abs=EXACT)
    assert run.estimate("all_layers.field_difference") == pytest.approx(0 if notes else -1, abs=EXACT)
    assert run.estimate("empty.error") < 1e-4
    if not notes:
        return
    assert run.estimate("effect_25.erased") == pytest.approx(1, abs=EXACT)
    assert run.estimate("effect_25.default_shift") == pytest.approx(0, abs=0.05)
    assert run.verdict("hiding-the-notes-erases-the-decision") == HOLDS
    assert run.verdict("more-than-hiding-as-many-positions") == HOLDS


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_dissociation(kind: str) -> None:
    """Base and donor differ in the value that the rule names, and the other cells of the square in the field.

    A note says that the case holds: it turns with the trigger and with the field, and stays when both change. A
    reader's full stops hold the value that the rule names: content, which turns the decision with the trigger alone.
    That patching from the donor recovers everything holds for both, so it tells nothing (critique ME6).
    """
    run = micro_run("dissociation", kind, 26)
    notes = kind == "note-taker"
    for name, recovery in (("trigger_only", 0), ("notes", 1), ("rule_rest", 1), ("after_rule", 0)):
        assert run.estimate(f"{name}.recovery") == pytest.approx(recovery, abs=EXACT)
    assert run.estimate("other_field_notes.recovery") == pytest.approx(1 if notes else 0, abs=0.05)
    assert run.estimate("same_conclusion_notes.recovery") == pytest.approx(0 if notes else 1, abs=0.05)
    assert run.estimate("conclusion_over_content.recovery") == pytest.approx(1 if notes else -1, abs=0.05)
    assert run.verdict("other-conclusion-turns-it") == (HOLDS if notes else FAILS)
    assert run.verdict("other-content-leaves-it") == (HOLDS if notes else FAILS)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_field_position(kind: str) -> None:
    """Neither distance nor mentions matter: the field acts by itself wherever it stands, or never."""
    run = micro_run("field_position", kind, 36, fractions=(0.9,))
    notes = kind == "note-taker"
    assert run.estimate("start.field_only.recovery") == pytest.approx(float(not notes), abs=EXACT)
    assert run.estimate("start.suffix_90.recovery") == pytest.approx(float(notes), abs=EXACT)
    assert run.estimate("distance.field_only_difference") == pytest.approx(0, abs=EXACT)
    assert run.estimate("mentions.field_only_difference") == pytest.approx(0, abs=EXACT)
    assert run.verdict("field-alone-does-nothing") == (HOLDS if notes else FAILS)


def test_a_note_taker_that_has_not_read_the_field_when_the_rule_comes_is_no_case_for_field_position() -> None:
    assert not micro_run("field_position_rule_first", "note-taker", 12, fractions=(0.9,)).gate.passed
    run = micro_run("field_position_rule_first", "reader", 12, fractions=(0.9,))
    for slot in ("after_policy", "after_filler", "end"):
        assert run.estimate(f"{slot}.field_only.recovery") == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("kind", ["note-taker", "reader", "errata"])
def test_wording(kind: str) -> None:
    """A line turns a stale context where "is now" is read; an edit in place turns a reader alone."""
    run = micro_run("wording", kind, 10)
    said_anyway = {"stale": False, "in_place": kind == "reader", "recomputed": True}
    for line in ("none", "restatement", "update", "override", "old_value", "neutral", "voids_conclusions"):
        for context, new in said_anyway.items():
            turned = {"update": True, "override": True, "old_value": False}.get(line, new) if kind == "errata" else new
            assert run.estimate(f"direct.{context}.{line}.new_rate") == turned
    assert run.estimate("direct.field_alone.difference") == (kind == "reader")


@pytest.mark.parametrize("kind", ["note-taker", "errata"])
def test_erratum_controls(kind: str) -> None:
    """Only an erratum with the new value of the field asked for turns a model that reads errata, wherever it stands.

    Of two that differ it learns nothing and goes by its notes, which hold the old value.
    """
    run = micro_run("erratum_controls", kind, 12)
    for arm in ("stale", "old_value", "neutral", "random", "irrelevant_field", "unmentioned_value"):
        assert run.estimate(f"{arm}.new_rate") == 0
    for arm in ("new_value", "irrelevant_then_new", "early_recomputed", "early_reused"):
        assert run.estimate(f"{arm}.new_rate") == (kind == "errata")
    for arm in ("old_then_new", "new_then_old"):
        assert run.estimate(f"{arm}.new_rate") == 0


@pytest.mark.parametrize("kind", ["note-taker", "reader", "thinker"])
def test_chain_knockout(kind: str) -> None:
    """A thinker's chain reads the field and its decision the chain; others decide as they do without a chain."""
    run = micro_run("chain_knockout", kind, 12)
    thinks = kind == "thinker"
    assert run.estimate("free.field_only.follows_new") == (kind != "note-taker")
    assert run.estimate("free.field_only.names_new_value") == thinks
    assert run.estimate("free.censored") == (not thinks)
    if kind != "reader":
        # A reader that cannot see the field, or its rule, is left to chance.
        assert run.estimate("block_field.field_only.follows_new") == 0
        assert run.estimate("mask_field.field_only.follows_new") == thinks


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_scrub(kind: str) -> None:
    """A note of another scenario with the same actions will do, if it has the same conclusion; the rest is idle."""
    run = micro_run("scrub", kind, 12, draws=1, sizes=(2,), minimum_donors=1)
    if kind == "reader":
        assert run.verdict("note-of-the-other-conclusion-turns-it") == FAILS
        return
    assert run.estimate("note_same.drift") == pytest.approx(0, abs=0.02)
    assert run.estimate("rest_opposite.recovery") == pytest.approx(0, abs=0.02)
    assert run.estimate("note_opposite.recovery") == pytest.approx(1, abs=0.02)
    assert run.estimate("note_opposite_2.recovery") == pytest.approx(1, abs=0.02)
    assert run.estimate("hypothesis.explained") == pytest.approx(1, abs=0.02)
    assert run.estimate("anything.drift") > 0.25
    assert {f"{arm}.drift" for arm in ARMS} <= set(run.effects)


@pytest.mark.parametrize("template", ["conversation", "lookup", "two_hop"])
def test_templates_that_a_model_cannot_read_are_none_of_its_business(template: str) -> None:
    run = micro_run(f"off_template_{template}", "reader", 8)
    assert not run.gate.passed
