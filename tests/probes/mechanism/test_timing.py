"""Laws of the timing probe: onsets, lenses, and patches of the whole residual stream."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import effects_of, gated, margin_behind, margin_of, measured, worded

from kvprobe.probes.kit.decoding import residuals
from kvprobe.probes.mechanism.timing.lenses import lens_margins, through, tuned_lens
from kvprobe.probes.mechanism.timing.probe import PLACES, Timing
from kvprobe.probes.mechanism.timing.reading import crossing

PROFILES = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@given(profile=PROFILES, level=st.floats(0.01, 1))
def test_an_onset_is_where_the_level_is_first_reached(profile: list[float], level: float) -> None:
    scores, top = np.array(profile), len(profile) - 1
    depth = crossing(scores, level)
    if scores.max() < level:
        assert depth == (top + 1) / top
        return
    at = depth * top
    below, above = int(np.floor(at + 1e-9)), int(np.ceil(at - 1e-9))
    assert scores[above] >= level
    assert (scores[:above] < level).all() or scores[above] == pytest.approx(level)
    assert np.interp(
        at, [below, max(above, below + 1)], scores[[below, min(max(above, below + 1), top)]]
    ) == pytest.approx(max(level, scores[0]), abs=1e-6)


@given(profile=PROFILES, first=st.floats(0.01, 1), second=st.floats(0.01, 1))
def test_a_higher_level_is_not_reached_earlier(profile: list[float], first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert crossing(np.array(profile), low) <= crossing(np.array(profile), high)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_the_lens_at_the_top_is_the_model(family: str) -> None:
    subject = worded(family, torch.float32)
    for pair in gated(2):
        answers = pair.base_answer_id, pair.donor_answer_id
        states = residuals(subject, pair.base.token_ids, [pair.decision_position])[0]
        margin = margin_behind(subject, pair, pair.base.token_ids)
        assert lens_margins(subject, states, answers)[-1] == pytest.approx(margin, abs=1e-3)
        assert lens_margins(subject, states, answers[::-1])[-1] == pytest.approx(-margin, abs=1e-3)


def test_the_lens_below_the_top_is_that_of_a_plain_hugging_face_script() -> None:
    subject = worded("qwen3")
    (pair,) = gated(1, seed=4)
    answers = pair.base_answer_id, pair.donor_answer_id
    ours = lens_margins(subject, residuals(subject, pair.base.token_ids, [pair.decision_position])[0], answers)
    with torch.no_grad():
        states = subject.model(torch.tensor([pair.base.token_ids]), output_hidden_states=True).hidden_states
        for layer in (0, 1, 2):
            logits = subject.model.lm_head(subject.model.model.norm(states[layer][0, -1]))
            assert ours[layer] == pytest.approx(margin_of(pair, logits), abs=1e-4)


def test_a_tuned_lens_finds_an_affine_map() -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    below = generator.standard_normal((300, 2, 8)).astype(np.float32)
    matrix, shift = generator.standard_normal((8, 8)), generator.standard_normal(8)
    top = below[:, 1] @ matrix + shift
    states = np.concatenate([below, top[:, None]], axis=1)
    seen = through(tuned_lens(states[:200], penalty=1e-6), states[200:])
    assert seen[:, 1] == pytest.approx(top[200:], abs=1e-3)
    assert seen[:, 2] == pytest.approx(top[200:], abs=1e-6)
    # The other layer has nothing to do with the top, so the best guess is the mean.
    assert np.abs(seen[:, 0] - top[200:]).mean() > 1


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return measured(Timing(folds=2, lens_tokens=4), worded("gemma2", torch.float32), gated(12))


def test_patches_begin_as_the_base_and_end_as_the_donor(rows: pd.DataFrame) -> None:
    patches = rows[rows["measurement"] == "patch"].set_index(["place", "layer"])
    top = int(rows["layer"].max())
    for place in PLACES:
        # Base and donor have the same tokens there.
        start = patches.loc[(place, 0)]
        assert (start["margin"] - start["m_base"]).abs().max() < 1e-3
    # At the top nothing but the decision token itself is read.
    end = patches.loc[("decision", top)]
    assert (end["margin"] - end["m_donor"]).abs().max() < 1e-3
    late = patches.loc[("note", top)]
    assert (late["margin"] - late["m_base"]).abs().max() < 1e-3


def test_every_instrument_reads_every_pair_at_every_layer_of_both_places(rows: pd.DataFrame) -> None:
    counts = rows.groupby(["measurement", "place", "layer"])["pair"].nunique()
    assert (counts == 12).all()
    assert len(counts) == 4 * 2 * (rows["layer"].max() + 1)


def made_rows(note: int, decision: int, layers: int = 6, pairs: int = 12) -> pd.DataFrame:
    """All instruments go from nothing to everything after so many blocks."""
    rows = crossed(pairs, place=PLACES, layer=range(layers + 1), measurement=["patch", "probe", "lens", "tuned"])
    there = rows["layer"] >= rows["place"].map(dict(zip(PLACES, (note, decision), strict=True)))
    # Before it is there a reading is right in one of the two prompts, as chance would have it.
    read = {"right_base": True, "right_donor": there, "base": -2.0, "donor": 4.0 * there - 2.0}
    return rows.assign(margin=4.0 * there - 2.0, **read)


@given(note=st.integers(1, 6), decision=st.integers(1, 6))
def test_summary_finds_the_onsets_that_were_put_in(note: int, decision: int) -> None:
    effects = effects_of(Timing(), made_rows(note, decision), resamples=999)
    # Half of the gap is passed half way between two blocks, 0.9 of the prompts after four fifths of the way.
    assert effects["patch_note.onset"].estimate == pytest.approx((note - 0.5) / 6)
    assert effects["patch_decision.onset"].estimate == pytest.approx((decision - 0.5) / 6)
    assert effects["probe_note.onset"].estimate == pytest.approx((note - 0.2) / 6)
    for instrument in ("patch", "probe"):
        assert effects[f"{instrument}.lead"].estimate == pytest.approx((decision - note) / 6)
        assert effects[f"{instrument}_note.peak"].estimate == pytest.approx(1)
    # The base prompts are right from the start, the donor prompts from then on.
    assert effects["lens_decision.commit"].estimate == pytest.approx(decision / 12)
    assert effects["lens_decision.error"].estimate == 0


def test_where_nothing_is_reached_the_lead_is_unknown() -> None:
    effects = effects_of(Timing(), made_rows(7, 7), resamples=999)
    assert effects["probe_note.onset"].estimate == pytest.approx(7 / 6)
    lead = effects["probe.lead"]
    assert (lead.low, lead.high) == (-np.inf, np.inf)
    assert effects["lens_decision.commit"].excluded == 12
