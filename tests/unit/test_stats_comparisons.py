"""Paired and equivalence tests, and multiplicity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.stats import adjust_benjamini_hochberg, adjust_holm, equivalent, mcnemar_exact

p_values = st.lists(st.floats(0, 1), max_size=12)


@given(p_values)
def test_adjusting_never_helps_and_holm_is_the_stricter(ps: list[float]) -> None:
    holm, bh = adjust_holm(ps), adjust_benjamini_hochberg(ps)
    assert len(holm) == len(bh) == len(ps)
    for p, strict, mild in zip(ps, holm, bh, strict=True):
        assert p <= mild + 1e-12
        assert mild <= strict + 1e-12
        assert strict <= 1


def test_adjusting_by_hand() -> None:
    assert adjust_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust_benjamini_hochberg([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.04, 0.04])


def test_mcnemar_counts_discordant_pairs_only() -> None:
    first, second = [1] * 10 + [0] + [1] * 50, [0] * 10 + [1] + [1] * 50
    result = mcnemar_exact(first, second)
    assert result.n == 11
    assert result.p_value == pytest.approx(0.01171875)  # 2 * P(Binomial(11, 1/2) <= 1)
    assert mcnemar_exact(first, first).p_value == 1.0
    with pytest.raises(ValueError, match="3 outcomes against 2"):
        mcnemar_exact([1, 0, 1], [1, 0])


def test_equivalence_needs_data_not_silence() -> None:
    draw = np.random.default_rng(0)
    assert equivalent(draw.normal(0, 0.01, size=50), 0.03).p_value < 0.001
    assert equivalent(draw.normal(0, 0.2, size=10), 0.03).p_value > 0.05
    assert equivalent(draw.normal(0.05, 0.01, size=50), 0.03).p_value > 0.99


def test_equivalence_counts_clusters() -> None:
    values = np.random.default_rng(0).normal(0, 0.03, size=6)
    once = equivalent(values, 0.03)
    often = equivalent(np.repeat(values, 40), 0.03, clusters=np.repeat(np.arange(6), 40))
    assert often.n == 6
    assert often.p_value == pytest.approx(once.p_value)
    with pytest.raises(ValueError, match="two clusters"):
        equivalent([0.1, 0.2], 0.03, clusters=["a", "a"])
