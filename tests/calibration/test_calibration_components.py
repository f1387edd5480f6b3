"""Probes of the residual stream, of heads and of features on models whose answer is known.

Worked out from `kvprobe.models.micro`: in a note-taker head `NOTE_WRITER` writes one channel of the residual stream
at the full stops of the cases in layer 1, and `NOTE_READER` reads it at the decision in layer 3. In a reader the same
full stops are equal in base and donor prompt, bit for bit. MLPs are zero.
"""

from __future__ import annotations

import pytest
from micro_runs import micro_run

from kvprobe.models import micro
from kvprobe.probes.mechanism.sae.training import SAESettings
from kvprobe.runs.claims import Outcome

HOLDS, FAILS = Outcome.HOLDS, Outcome.FAILS
EXACT = 5e-3


@pytest.mark.parametrize("kind", ["note-taker", "unread-notes", "reader"])
def test_linear_probe(kind: str) -> None:
    """Notes can be decoded whether or not anybody reads them: decoding is no evidence of use."""
    run = micro_run("linear_probe", kind, 24, places=("field", "rule", "decision"), shuffles=1, folds=3, inner_folds=2)
    notes = kind != "reader"
    assert 0.25 < run.estimate("conclusion.field.accuracy") < 0.75
    # Without notes both prompts of a pair are equal there, and exactly one of two opposite answers is right.
    assert run.estimate("conclusion.rule.accuracy") == (1.0 if notes else 0.5)
    assert run.estimate("conclusion.rule.vocabulary.accuracy") == (1.0 if notes else 0.5)
    assert 0.2 < run.estimate("shuffled.rule.accuracy") < 0.8
    assert run.verdict("notes-hold-the-conclusion") == (HOLDS if notes else FAILS)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_timing(kind: str) -> None:
    """A patch at the rule acts after two blocks of four, when the notes are there, and until block 4 has read them.

    At the decision it acts after four, when they have been read; in a reader after three, when the value has been
    fetched. Onsets are interpolated between blocks: half of the way.
    """
    run = micro_run("timing", kind, 16, folds=3, lens_tokens=4)
    notes = kind == "note-taker"
    assert run.estimate("patch_note.peak") == pytest.approx(float(notes), abs=EXACT)
    assert run.estimate("patch_decision.peak") == pytest.approx(1, abs=EXACT)
    assert run.estimate("patch_decision.onset") == pytest.approx((3.5 if notes else 2.5) / micro.LAYERS, abs=EXACT)
    assert run.estimate("probe_note.peak") == (1.0 if notes else 0.5)
    assert run.estimate("lens_decision.error") < 1e-3
    if notes:
        assert run.estimate("patch_note.onset") == pytest.approx(1.5 / micro.LAYERS, abs=EXACT)
        assert run.estimate("patch.lead") == pytest.approx(2 / micro.LAYERS, abs=EXACT)
        assert 1 / micro.LAYERS < run.estimate("probe_note.onset") <= 2 / micro.LAYERS
        assert run.verdict("noted-before-the-decision-by-patches") == HOLDS
    else:
        assert run.verdict("noted-before-the-decision-by-patches") == FAILS


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_direction(kind: str) -> None:
    """The note is one channel: moving along it is all, and half way between the classes the margin is 0."""
    run = micro_run("direction", kind, 12, random_draws=2, search_steps=10)
    notes = float(kind == "note-taker")
    assert run.estimate("full.recovery") == pytest.approx(notes, abs=EXACT)
    assert run.estimate("along.recovery") == pytest.approx(notes, abs=EXACT)
    assert run.estimate("das.recovery") == pytest.approx(notes, abs=0.1)
    assert run.estimate("orthogonal.recovery") == pytest.approx(0, abs=EXACT)
    assert run.estimate("random.recovery") == pytest.approx(0, abs=0.1)
    assert run.estimate("necessity.drop") == pytest.approx(notes / 2, abs=EXACT)
    if notes:
        assert run.estimate("logistic.recovery") == pytest.approx(1, abs=0.1)
        assert run.estimate("chosen.depth") == 2 / micro.LAYERS
    assert run.verdict("one-direction-carries-part") == (HOLDS if notes else FAILS)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_heads(kind: str) -> None:
    run = micro_run("heads", kind, 8, sizes=(1, 2), control_size=1, draws=4, further_draws=1, write_heads=2)
    notes = float(kind == "note-taker")
    table = run.rows[run.rows["measurement"] == "head"]
    recovery = (table["margin"] - table["m_base"]) / (table["m_donor"] - table["m_base"])
    by_head = recovery.groupby([table["layer"].astype(int), table["head"].astype(int)]).mean()
    reading = [micro.NOTE_READER] if notes else [micro.FIELD_READER, micro.RULE_READER]
    assert {place for place, value in by_head.items() if value > 0.5} == set(reading)
    assert all(by_head[place] == pytest.approx(1, abs=EXACT) for place in reading)
    assert by_head.drop(reading).abs().max() < EXACT
    # Patched together with the heads that read it, or one alone: always the whole decision.
    for name in ("read_in_sample_1", "read_held_out_1", "read_noising_1"):
        assert run.estimate(f"{name}.recovery") == pytest.approx(1, abs=EXACT)
    # The reader's heads read the field, so nothing after it moves them; and nothing writes, and nothing is held.
    for name in ("read_notes_2", "write_held_out_1", "kv_held_out_1"):
        assert run.estimate(f"{name}.recovery") == pytest.approx(notes, abs=EXACT)
    assert run.estimate("write_one_1.recovery") == pytest.approx(notes / 2, abs=EXACT)
    assert run.estimate("ablate_held_out_2.gap_retained") == pytest.approx(0, abs=0.1)
    if notes:
        writers = run.rows[run.rows["measurement"] == "write_head"].sort_values("rank").groupby("pair").first()
        assert set(zip(writers["layer"], writers["head"], strict=True)) == {micro.NOTE_WRITER}
        assert run.estimate("ablate_others_2.gap_retained") == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_attn_vs_mlp(kind: str) -> None:
    """Attention writes all: at the note from the field in layer 1, at the decision from the rule in layer 3.

    In a reader the decision's change is the value (from the field, layer 2) and the action (from the rule, layer 3),
    each a difference of two codes of length 1, so about half of it each.
    """
    run = micro_run("attn_vs_mlp", kind, 8)
    notes = kind == "note-taker"
    assert run.estimate("decision.attention_share_final") == pytest.approx(1, abs=EXACT)
    assert run.estimate("decision.from_field") == pytest.approx(0 if notes else 0.5, abs=EXACT if notes else 0.05)
    assert run.estimate("decision.from_policy") == pytest.approx(1 if notes else 0.5, abs=EXACT if notes else 0.05)
    assert run.estimate("identity.error") < 1e-3
    for layer in range(micro.LAYERS):
        assert run.estimate(f"decision.mlp_of_layer_{layer}") == 0
    if notes:
        assert run.estimate("note.attention_share_final") == pytest.approx(1, abs=EXACT)
        assert run.estimate("note.attention_of_layer_1") == pytest.approx(1, abs=EXACT)
        assert run.estimate("note.from_field") == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("kind", ["note-taker", "reader"])
def test_sae(kind: str) -> None:
    """What does not depend on which features training finds: the notes as a whole, and clamps that change nothing."""
    settings = SAESettings(features=64, k=8, vectors=2048)
    few = {"training_pairs": 6, "site_pairs": 4, "permutations": 99, "cause_pairs": 2, "draws": 1, "sizes": (1, 3)}
    run = micro_run("sae", kind, 10, sae=settings, **few)
    assert run.estimate("full.recovery") == pytest.approx(float(kind == "note-taker"), abs=EXACT)
    assert run.estimate("self_clamp.recovery") == pytest.approx(0, abs=EXACT)
    assert run.estimate("matched_1.recovery") == pytest.approx(0, abs=0.1)
    # Worse than the mean of all vectors is no dictionary at all; one channel of the stream is large and constant.
    assert run.estimate("fvu.held_out") < 1
