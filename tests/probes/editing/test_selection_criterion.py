"""Laws of the criterion study: what is ranked by whom, that profiles never see their skeleton, copies and recomputes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import effects_of, gated, measured, worded

from kvprobe.engine.forward import prefill
from kvprobe.errors import SampleError
from kvprobe.models.subject import Subject
from kvprobe.probes.editing.selection_criterion import probe as selection_criterion
from kvprobe.probes.editing.selection_criterion.probe import (
    BLIND,
    PROFILES,
    RANDOM,
    UPPER_BOUNDS,
    SelectionCriterion,
    kv_change,
    same_field_orders,
)
from kvprobe.probes.kit.aligned_positions import slots
from kvprobe.probes.kit.edit_arms import make_arm, run_arm
from kvprobe.probes.kit.edit_cases import edit_case
from kvprobe.probes.kit.ranking import SinglePositions
from kvprobe.tasks.pairs import Pair

PROBE = SelectionCriterion(sizes=(3,), draws=2, folds=2)
PAIRS = gated(3)


def test_every_criterion_is_recomputed_and_copied_as_the_edit_methods_do() -> None:
    subject, pairs = worded("qwen3"), PAIRS[:2]
    rows = measured(PROBE, subject, pairs)
    found = rows[(rows["pair"] == 0) & (rows["criterion"] != RANDOM)].set_index("arm")["margin"]
    # Two pairs of different skeletons leave no profile of the same field.
    names = {*BLIND, *PROFILES, *UPPER_BOUNDS} - {"profile_same_field"}
    assert set(found.index) == {f"{name}_3{how}" for name in names for how in ("", "_copied")}
    case = edit_case(subject, pairs[0])
    for criterion in BLIND:
        for method, how in (("selective", ""), ("oracle_copy", "_copied")):
            row = run_arm(subject, case, make_arm("arm", method, k=3, criterion=criterion))
            assert found[f"{criterion}_3{how}"] == pytest.approx(row["margin"], abs=1e-9)
    drawn = rows[rows["criterion"] == RANDOM].groupby("pair")["margin"]
    assert (drawn.count() == 2).all()
    assert (drawn.nunique() == 2).all()


def test_all_tokens_are_the_oracle_however_they_are_ranked() -> None:
    rows = measured(PROBE.model_copy(update={"sizes": (999,)}), worded("qwen3"), PAIRS[:2])
    torch.testing.assert_close(torch.tensor(rows["margin"].to_list()), torch.tensor(rows["m_donor"].to_list()))


def test_kv_change_against_plain_norms() -> None:
    subject, pair = worded("llama"), PAIRS[0]
    old, new = (prefill(subject, prompt.token_ids).cache for prompt in (pair.base, pair.donor))
    change = kv_change(old, new, pair.downstream.positions)
    assert list(change) == list(pair.downstream.positions)
    for position in (pair.field.end, pair.decision_position - 1):
        ought = sum(
            np.linalg.norm((ours[0, :, position] - theirs[0, :, position]).numpy())
            for mine, other in zip(old.layers, new.layers, strict=True)
            for ours, theirs in ((mine.keys, other.keys), (mine.values, other.values))
        )
        assert change[position] == pytest.approx(float(ought), rel=1e-5)


@given(loudest=st.integers(0, 30), seed=st.integers(0, 9))
def test_a_profile_of_the_same_field_is_made_by_other_pairs_of_it(loudest: int, seed: int) -> None:
    one, stranger = gated(2, seed=seed)
    places = list(one.downstream.positions)
    loud = places[loudest % len(places)]

    def reading(position: int | None, *, decided: bool = True) -> SinglePositions:
        return SinglePositions({place: float(place == position) for place in places}, 1.0, decided)

    shifts = dict.fromkeys(stranger.downstream.positions, 1.0)
    singles = [reading(None), reading(loud), SinglePositions(shifts, 1.0, decided=True)]
    orders = same_field_orders([one, one, stranger], singles)
    assert orders[0] is not None
    slot = slots(one)
    assert slot[orders[0][0]] == slot[loud]
    assert orders[2] is None
    undecided = same_field_orders([one, one], [reading(None), reading(loud, decided=False)])
    assert undecided[0] is None


def test_a_profile_does_not_read_its_own_skeleton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a pair's own positions do, its profile stays, and its in-sample order does not."""
    subject, pairs = worded("qwen3"), PAIRS
    seen: list[list[dict[str, list[int]]]] = []
    honest = selection_criterion.single_positions

    def falsified(subject: Subject, pair: Pair, *arguments: Any) -> SinglePositions:
        found = replace(honest(subject, pair, *arguments), decided=True)
        if pair is not pairs[0]:
            return found
        return replace(found, shifts={place: -shift for place, shift in found.shifts.items()})

    def made_decided(*arguments: Any) -> SinglePositions:
        return replace(honest(*arguments), decided=True)

    for single in (made_decided, falsified):
        monkeypatch.setattr(selection_criterion, "single_positions", single)
        seen.append(PROBE.learned_orders(subject, pairs, lambda done, total: None))
    assert seen[0][0]["profile"] == seen[1][0]["profile"]
    assert seen[0][0]["in_sample"] != seen[1][0]["in_sample"]
    assert any(seen[0][other]["profile"] != seen[1][other]["profile"] for other in (1, 2))


def made_rows(recovered: dict[str, float], pairs: int = 20) -> pd.DataFrame:
    """Rows in which each arm recovers a share of the way in every pair."""
    rows = crossed(pairs, criterion=[*BLIND, *PROFILES, *UPPER_BOUNDS, RANDOM, RANDOM], how=["", "_copied"])
    arm, margin = rows["criterion"] + "_3" + rows["how"], (rows["criterion"] + rows["how"]).map(recovered).fillna(0.0)
    return rows.assign(size=3, arm=arm, margin=4 * margin - 2, correct=margin > 0.5)


@given(profile=st.floats(0, 1), copied=st.floats(0, 1), chance=st.floats(0, 1))
def test_summary_finds_what_was_put_in(profile: float, copied: float, chance: float) -> None:
    effects = effects_of(PROBE, made_rows({"profile": profile, "profile_copied": copied, "random": chance}))
    assert effects["profile_3.recovery"].estimate == pytest.approx(profile, abs=1e-9)
    assert effects["profile_3.copied_recovery"].estimate == pytest.approx(copied, abs=1e-9)
    assert effects["profile_copy_gap_3.recovery"].estimate == pytest.approx(copied - profile, abs=1e-9)
    assert effects["profile_over_random_3.recovery"].estimate == pytest.approx(profile - chance, abs=1e-9)
    assert effects["in_sample_over_profile_3.recovery"].estimate == pytest.approx(-profile, abs=1e-9)
    assert effects["profile_3.correct_rate"].estimate == float(profile > 0.5)
    assert effects["profile_over_random_3.recovery"].n == 20


def test_fewer_skeletons_than_folds_are_refused() -> None:
    with pytest.raises(SampleError, match="folds needs"):
        measured(SelectionCriterion(), worded("qwen3"), PAIRS[:2])
