"""Cohen's kappa against scikit-learn and by hand, and how often its interval holds the truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from kvprobe.stats import proportion
from kvprobe.stats.kappa import cohen_kappa

ANSWERS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=4, max_size=40)


@given(ANSWERS)
def test_against_scikit_learn(answers: list[tuple[int, int]]) -> None:
    ours, theirs = zip(*answers, strict=True)
    if len({*ours, *theirs}) == 1:
        return
    effect = cohen_kappa("x", ours, theirs)
    assert effect.estimate == pytest.approx(cohen_kappa_score(ours, theirs))
    assert effect.low <= effect.estimate <= effect.high
    # By hand: two independent raters with these frequencies would agree so often.
    chance = sum(ours.count(answer) * theirs.count(answer) for answer in range(3)) / len(ours) ** 2
    assert effect.extra["chance_agreement"] == pytest.approx(chance)
    agreed = np.equal(ours, theirs).mean()
    assert effect.estimate * (1 - chance) == pytest.approx(agreed - chance)


def test_a_reference_that_gives_both_answers_alike_makes_it_twice_the_agreement_less_one() -> None:
    reference = [0, 1] * 10
    constant = cohen_kappa("x", [1] * 20, reference)
    assert constant.estimate == 0.0
    assert constant.extra["observed_agreement"] == 0.5
    perfect = cohen_kappa("x", reference, reference, clusters=[row // 2 for row in range(20)])
    bound = proportion("x", [1.0] * 20, clusters=[row // 2 for row in range(20)])
    assert (perfect.estimate, perfect.high, perfect.low) == (1.0, 1.0, pytest.approx(2 * bound.low - 1))
    assert perfect.low < 1.0


def test_undefined_and_unequal_series_are_refused() -> None:
    with pytest.raises(ValueError, match="same one"):
        cohen_kappa("x", [1, 1], [1, 1])
    with pytest.raises(ValueError, match="2 answers against 3"):
        cohen_kappa("x", [0, 1], [0, 1, 1])


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_its_interval_holds_the_truth_with_clusters(share: float) -> None:
    draw = np.random.Generator(np.random.PCG64(7))
    clusters, hits, experiments = np.repeat(np.arange(25), 2), 0, 200
    reference = np.tile([0, 1], 25)
    for _ in range(experiments):
        # Whole scenarios agree or not, half of the time, and single prompts do else.
        common, single = draw.random(25)[clusters] < share, draw.random(50) < share
        agrees = np.where((draw.random(25) < 0.5)[clusters], common, single)
        effect = cohen_kappa("x", np.where(agrees, reference, 1 - reference), reference, clusters=list(clusters))
        hits += effect.low <= 2 * share - 1 <= effect.high
    assert 0.9 <= hits / experiments <= 0.995
