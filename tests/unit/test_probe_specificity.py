"""Laws of ranking and of the specificity probe, and one number against plain Hugging Face."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worded_models import aligned, answers_of, labelled, plain_margin, worded

from kvprobe.probes.kit.aligned_positions import slots
from kvprobe.probes.kit.ranking import SinglePositions, held_out_orders, in_sample_order, matched_sets, random_sets
from kvprobe.probes.mechanism.specificity.probe import Specificity
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair

PAIRS = aligned(GatedDecision(size=4))


def measured(dtype: torch.dtype = torch.float32, **parameters: Any) -> pd.DataFrame:
    probe = Specificity(Specificity.Parameters(matched_draws=3, random_draws=2, folds=2, **parameters))
    return labelled(probe.measure(worded(dtype=dtype), PAIRS, lambda done, total: None), PAIRS)


def test_one_position_and_all_of_them_agree_with_the_plain_script_in_float64() -> None:
    sizes = (1, *sorted({len(pair.downstream) for pair in PAIRS}))
    rows = measured(torch.float64, sizes=sizes)
    model = worded().model
    pair, decisions = (
        PAIRS[0],
        rows[(rows["pair"] == 0) & (rows["measurement"] == "decision")].set_index("intervention"),
    )
    single = rows[(rows["pair"] == 0) & (rows["measurement"] == "single_position")].set_index("position")["margin"]
    best = int(single.idxmax())
    for name, positions in (
        (f"in_sample_{1}", [best]),
        (f"held_out_{len(pair.downstream)}", pair.downstream.positions),
    ):
        expected = plain_margin(model, pair.base.token_ids, pair.donor.token_ids, list(positions), answers_of(pair))
        assert decisions.loc[name, "margin"] == pytest.approx(expected, abs=1e-9)
    assert decisions.loc["in_sample_1", "margin"] == pytest.approx(single.max(), abs=1e-9)


def test_a_set_of_all_positions_is_no_better_than_a_random_one() -> None:
    length = min(len(pair.downstream) for pair in PAIRS)
    rows = measured(sizes=(length,))
    whole = rows[(rows["measurement"] == "decision") & (rows["pair"] == _shortest(length))]
    assert whole["margin"].max() - whole["margin"].min() < 1e-4


def _shortest(length: int) -> int:
    return next(index for index, pair in enumerate(PAIRS) if len(pair.downstream) == length)


@given(seed=st.integers(0, 999), size=st.integers(1, 30))
def test_matched_sets_match_and_random_sets_are_sets_of_the_pool(seed: int, size: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    pool = list(range(20, 20 + 40))
    delimiters = {int(p) for p in generator.choice(pool, 12, replace=False)}
    chosen = [int(p) for p in generator.choice(pool, size, replace=False)]

    def kinds(positions: list[int] | tuple[int, ...]) -> Counter[tuple[int, bool]]:
        return Counter((3 * (p - 20) // 40, p in delimiters) for p in positions)

    drawn = matched_sets(chosen, pool, delimiters, 5, generator)
    assert all(kinds(one) == kinds(chosen) and len(set(one)) == size for one in drawn)
    free = random_sets(pool, size, 5, generator)
    assert all(len(set(one)) == size and set(one) <= set(pool) for one in free)


def made_singles(pairs: list[Pair], generator: np.random.Generator) -> list[SinglePositions]:
    shifts = [{p: float(generator.normal()) for p in pair.downstream.positions} for pair in pairs]
    return [SinglePositions(shift, 10.0, True) for shift in shifts]


@given(seed=st.integers(0, 99))
def test_a_held_out_order_never_depends_on_the_pairs_of_its_own_skeleton(seed: int) -> None:
    pairs = aligned(GatedDecision(size=34))
    generator = np.random.Generator(np.random.PCG64(seed))
    singles = made_singles(pairs, generator)
    before = held_out_orders(pairs, singles, 3, 0)
    own = {i for i, pair in enumerate(pairs) if pair.scenario.skeleton == pairs[0].scenario.skeleton}
    assert len(own) > 1
    other = made_singles(pairs, generator)
    changed = [other[i] if i in own else single for i, single in enumerate(singles)]
    after = held_out_orders(pairs, changed, 3, 0)
    assert before[0] == after[0]
    assert in_sample_order(singles[0]) != in_sample_order(changed[0])
    assert any(before[i] != after[i] for i in range(len(pairs)))


def test_a_slot_that_acts_everywhere_is_found_on_other_skeletons() -> None:
    pairs = aligned(GatedDecision(size=30))
    singles, wanted = [], []
    for pair in pairs:
        places = slots(pair)
        strong = [
            p for p in pair.downstream.positions if (places[p].segment, places[p].anchor) == ("policy", "donor action")
        ]
        wanted.append(strong[0])
        shifts = {p: 5.0 if p == strong[0] else 0.0 for p in pair.downstream.positions}
        singles.append(SinglePositions(shifts, 10.0, True))
    orders = held_out_orders(pairs, singles, 5, 0)
    assert [order[0] for order in orders] == wanted


def made_rows(held_out: float, matched: list[float]) -> pd.DataFrame:
    rows = []
    for pair in range(10):
        common = {"pair": pair, "skeleton": f"s{pair}", "m_base": -5.0, "m_donor": 5.0, "noise_floor": 1e-6}
        common |= {"measurement": "decision", "positions": 8}
        drawn = [
            ("in_sample", 1.0),
            ("held_out", held_out),
            ("random", 0.0),
            *(("matched", value) for value in matched),
        ]
        for selection, recovery in drawn:
            margin = -5 + 10 * recovery
            rows.append({**common, "intervention": f"{selection}_8", "margin": margin, "flipped": margin > 0})
    return pd.DataFrame(rows)


def effects_of(rows: pd.DataFrame) -> dict[str, Effect]:
    return {effect.name: effect for effect in Specificity().summarise(rows, StatisticsConfig())}


def test_the_lead_over_matched_sets_and_how_many_of_them_reach_it() -> None:
    effects = effects_of(made_rows(0.8, [0.0, 0.1, 0.2, 0.9]))
    assert effects["held_out_8.recovery"].estimate == pytest.approx(0.8)
    assert effects["matched_8.recovery"].estimate == pytest.approx(0.3)
    assert effects["matched_8.recovery"].n == 10
    assert effects["lead_8.recovery"].estimate == pytest.approx(0.5)
    assert effects["matched_8.reach_rate"].estimate == pytest.approx(0.25)
    assert effects["matched_8.reach_rate"].clusters == 10


def test_the_same_seed_draws_the_same_sets() -> None:
    first = measured(sizes=(2, 4))
    pd.testing.assert_frame_equal(first, measured(sizes=(2, 4)))
    assert not first["margin"].equals(measured(sizes=(2, 4), seed=1)["margin"])
