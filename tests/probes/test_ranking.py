"""Laws of cross-fitting, of ranking positions on other skeletons, and of sets of positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worded_models import aligned

from kvprobe.errors import SampleError
from kvprobe.probes.kit.aligned_positions import slots
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.probes.kit.position_sets import position_sets
from kvprobe.probes.kit.ranking import Ranking, SinglePositions, held_out_orders, in_sample_order
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair

SKELETONS = st.lists(st.integers(0, 30).map("s{}".format), min_size=1, max_size=120)


@given(skeletons=SKELETONS, count=st.integers(2, 6), seed=st.integers(0, 1000))
def test_every_row_is_evaluated_once_by_other_skeletons(skeletons: list[str], count: int, seed: int) -> None:
    if len(set(skeletons)) < count:
        with pytest.raises(SampleError, match=f"needs {count} skeletons"):
            folds(skeletons, count, seed)
        return
    made = folds(skeletons, count, seed)
    assert len(made) == count
    assert sorted(row for _, evaluation in made for row in evaluation) == list(range(len(skeletons)))
    for selection, evaluation in made:
        assert evaluation
        assert sorted(selection + evaluation) == list(range(len(skeletons)))
        assert {skeletons[row] for row in selection}.isdisjoint(skeletons[row] for row in evaluation)
        assert selection == sorted(selection)
        assert evaluation == sorted(evaluation)
    sizes = [len({skeletons[row] for row in evaluation}) for _, evaluation in made]
    assert max(sizes) - min(sizes) <= 1


@given(order=st.permutations(range(24)), seed=st.integers(0, 1000))
def test_the_skeletons_alone_decide_which_go_together(order: list[int], seed: int) -> None:
    skeletons = [f"s{row // 2}" for row in range(24)]
    shuffled = [skeletons[row] for row in order]
    once = [{skeletons[row] for row in evaluation} for _, evaluation in folds(skeletons, 4, seed)]
    again = [{shuffled[row] for row in evaluation} for _, evaluation in folds(shuffled, 4, seed)]
    assert once == again


def test_another_seed_splits_differently() -> None:
    skeletons = [f"s{row}" for row in range(20)]
    assert folds(skeletons, 5, 0) == folds(skeletons, 5, 0) != folds(skeletons, 5, 1)


@given(seed=st.integers(0, 999), size=st.integers(1, 30))
def test_matched_sets_match_the_held_out_one_and_random_sets_are_of_the_pool(seed: int, size: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    pool = range(20, 60)
    delimiters = {int(position) for position in generator.choice(pool, 12, replace=False)}
    shifts, scores = ({position: float(generator.normal()) for position in pool} for _ in range(2))
    ranking = Ranking(SinglePositions(shifts, 10.0, decided=True), scores)
    draws = {"in_sample": 1, "held_out": 1, "matched": 5, "random": 5}
    sets = list(position_sets(ranking, (size, 41), draws, generator, delimiters))
    assert Counter(one.name for one in sets) == {f"{name}_{size}": count for name, count in draws.items()}
    assert all(len(set(one.positions)) == size and set(one.positions) <= set(pool) for one in sets)
    strongest = {"in_sample": shifts, "held_out": scores}

    def kinds(positions: Iterable[int]) -> Counter[tuple[int, bool]]:
        return Counter((3 * (p - 20) // 40, p in delimiters) for p in positions)

    for one in sets:
        if one.selection in strongest:
            by = strongest[one.selection]
            assert min(by[p] for p in one.positions) >= max(by[p] for p in set(pool) - {*one.positions})
        elif one.selection == "matched":
            assert kinds(one.positions) == kinds(ranking.held_out[:size])


def made_singles(pairs: list[Pair], generator: np.random.Generator) -> list[SinglePositions]:
    shifts = [{p: float(generator.normal()) for p in pair.downstream.positions} for pair in pairs]
    return [SinglePositions(shift, 10.0, decided=True) for shift in shifts]


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
        strong = next(
            p for p in pair.downstream.positions if (places[p].segment, places[p].anchor) == ("policy", "donor action")
        )
        wanted.append(strong)
        shifts = {p: 5.0 if p == strong else 0.0 for p in pair.downstream.positions}
        singles.append(SinglePositions(shifts, 10.0, decided=True))
    assert [order[0] for order in held_out_orders(pairs, singles, 5, 0)] == wanted
