"""Cross-fitting: laws of the splits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.errors import SampleError
from kvprobe.probes.kit.cross_fitting import folds

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


def test_another_seed_splits_otherwise() -> None:
    skeletons = [f"s{row}" for row in range(20)]
    assert folds(skeletons, 5, 0) == folds(skeletons, 5, 0) != folds(skeletons, 5, 1)
