"""Laws of the estimators; whether they cover is in test_stats_coverage."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.stats import (
    Effect,
    Label,
    StatisticsConfig,
    bootstrapped,
    maximum,
    mean,
    mean_of_ratios,
    median,
    proportion,
    ratio_of_sums,
)

samples = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=30)
scales = st.floats(1e-3, 1e3)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def close(a: float, b: float, size: float = 1.0) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-8 * max(size, 1e-12))


@given(samples, scales)
def test_scale_equivariance(values: list[float], scale: float) -> None:
    one, other = mean("x", values, noise_floor=0.1), mean("x", np.array(values) * scale, noise_floor=0.1 * scale)
    for a, b in zip((one.estimate, one.low, one.high), (other.estimate, other.low, other.high), strict=True):
        assert close(a * scale, b, 100 * scale)


@given(samples, st.floats(-50, 50))
def test_shift_equivariance(values: list[float], shift: float) -> None:
    one, other = mean("x", values), mean("x", np.array(values) + shift)
    assert close(one.low + shift, other.low, 1000)
    assert close(one.high + shift, other.high, 1000)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(1, 9)), min_size=2, max_size=20), scales)
def test_a_recovery_has_no_unit(rows: list[tuple[float, float]], scale: float) -> None:
    shift, gap = np.array(rows).T
    one, other = ratio_of_sums("r", shift, gap), ratio_of_sums("r", shift * scale, gap * scale)
    assert close(one.estimate, other.estimate)
    if math.isfinite(one.high):
        assert close(one.low, other.low, abs(one.low) + abs(one.high))


@given(samples, st.randoms())
def test_order_of_rows_and_names_of_clusters_do_not_matter(values: list[float], random: object) -> None:
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    labels = [f"c{i % 4}" for i in range(len(values))]
    one = mean("x", values, clusters=labels)
    other = mean("x", [values[i] for i in order], clusters=[labels[i].upper() for i in order])
    assert close(one.low, other.low, 1000)
    assert close(one.high, other.high, 1000)


@pytest.mark.parametrize("clustered", [False, True])
def test_width_shrinks_as_one_over_root_n(clustered: bool) -> None:
    def width(groups: int) -> float:
        widths = []
        for seed in range(60):
            draw = rng(seed)
            values = draw.normal(size=(groups, 4)) + draw.normal(size=(groups, 1))
            rows = values.ravel() if clustered else values[:, 0]
            labels = np.repeat(np.arange(groups), 4) if clustered else None
            effect = mean("x", rows, clusters=labels)
            widths.append(effect.high - effect.low)
        return float(np.mean(widths))

    assert width(50) / width(200) == pytest.approx(2.0, rel=0.08)
    assert width(200) / width(800) == pytest.approx(2.0, rel=0.08)


def test_repeating_every_row_adds_no_certainty_when_clusters_are_known() -> None:
    values = rng().normal(size=12)
    once = mean("x", values, clusters=range(12))
    often = mean("x", np.repeat(values, 50), clusters=np.repeat(np.arange(12), 50))
    assert often.n == 600
    assert often.clusters == 12
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_mean_of_independent_rows_is_the_textbook_interval() -> None:
    effect = mean("x", [1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.7764451052 * math.sqrt(2.5) / math.sqrt(5)
    assert (effect.low, effect.high) == pytest.approx((3 - half, 3 + half))
    assert effect.method == "cluster t"


def test_fieller_agrees_with_the_test_it_inverts() -> None:
    from scipy import stats

    draw = rng(3)
    gap = draw.uniform(5, 15, size=9)
    shift = 0.3 * gap + draw.normal(size=9)
    effect = ratio_of_sums("r", shift, gap)
    for end in (effect.low, effect.high):
        assert stats.ttest_1samp(shift - end * gap, 0.0).pvalue == pytest.approx(0.05, rel=1e-6)


def test_gaps_that_may_be_zero_bound_nothing() -> None:
    effect = ratio_of_sums("r", [1.0, -1.0, 2.0, 0.5, 1.0], [5.0, -4.0, 1.0, -3.0, 2.0])
    assert effect.low == -math.inf
    assert effect.high == math.inf
    assert Effect.from_record(effect.to_record()) == effect


def test_one_tiny_gap_moves_the_mean_of_ratios_only() -> None:
    gap = np.array([10.0] * 9 + [0.001])
    shift = np.array([1.0] * 9 + [1.0])
    assert mean_of_ratios("r", shift, gap).estimate > 50
    effect = ratio_of_sums("r", shift, gap)
    assert effect.estimate < 0.12
    assert effect.extra["mean_of_ratios"] > 50
    assert effect.extra["median"] == pytest.approx(0.1)


@given(st.floats(-3, 3), st.integers(2, 20), st.floats(1e-6, 1))
def test_identical_values_are_no_more_certain_than_the_noise(value: float, n: int, floor: float) -> None:
    effect = mean("x", [value] * n, noise_floor=floor)
    assert effect.low <= effect.estimate - floor
    assert effect.high >= effect.estimate + floor


def test_noise_floor_of_a_recovery_is_in_its_own_unit() -> None:
    effect = ratio_of_sums("r", [10.0] * 6, [10.0] * 6, noise_floor=0.5)
    assert effect.noise_floor == pytest.approx(0.05)
    assert (effect.low, effect.high) == pytest.approx((0.95, 1.05))


def test_few_clusters_of_many_rows_give_a_range() -> None:
    values = np.repeat([0.1, 0.2, 0.3], 20) + rng().normal(0, 1e-3, size=60)
    effect = mean("x", values, clusters=np.repeat(["a", "b", "c"], 20))
    assert effect.method == "range"
    assert effect.is_range
    assert (effect.low, effect.high) == pytest.approx((0.1, 0.3), abs=0.01)
    assert "range" in str(effect)
    assert mean("x", [0.1, 0.2, 0.3, 0.4, 0.5], clusters="abcde").method == "cluster t"
    assert mean("x", values, clusters=np.repeat(range(8), 8)[:60]).method == "cluster t"
    assert mean("x", [1.0]).is_range


def test_median_is_distribution_free() -> None:
    values = np.exp(rng().normal(size=30) * 3)
    effect = median("m", values)
    logs = median("m", np.log(values))
    assert (effect.low, effect.high) == pytest.approx((np.exp(logs.low), np.exp(logs.high)))
    assert effect.method == "order statistics"
    assert median("m", values[:5]).method == "range"


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_proportions_stay_in_the_unit_interval_and_are_never_certain(successes: list[bool]) -> None:
    effect = proportion("p", successes)
    assert 0 <= effect.low <= effect.estimate <= effect.high <= 1
    assert effect.high > effect.low
    opposite = proportion("p", [not s for s in successes])
    assert opposite.low == pytest.approx(1 - effect.high, abs=1e-9)


def test_proportion_is_wilson() -> None:
    effect = proportion("p", [True] * 7 + [False] * 3)
    assert (effect.low, effect.high) == pytest.approx((0.3968, 0.8922), abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=25))
def test_no_sample_is_told_as_better_than_a_perfect_one(clusters: list[tuple[int, int]]) -> None:
    labels = np.repeat(np.arange(len(clusters)), [size for _, size in clusters])
    rows = np.concatenate([np.arange(size) < successes for successes, size in clusters])
    some, all_of_them = (proportion("p", r, clusters=labels) for r in (rows, np.ones_like(rows)))
    assert some.low <= all_of_them.low + 1e-12
    assert all_of_them.low == pytest.approx(0.05 ** (1 / len(clusters)))
    assert all_of_them.method == "exact binomial"


@given(st.integers(1, 80))
def test_a_share_of_independent_rows_rises_with_every_success(n: int) -> None:
    lows = [proportion("p", np.arange(n) < k).low for k in range(n + 1)]
    assert lows == sorted(lows)


def test_clusters_widen_a_proportion() -> None:
    rows = np.repeat(rng().integers(0, 2, size=20), 10)
    alone = proportion("p", rows)
    clustered = proportion("p", rows, clusters=np.repeat(np.arange(20), 10))
    assert clustered.high - clustered.low > 2 * (alone.high - alone.low)
    unanimous = proportion("p", [1] * 200, clusters=np.repeat(np.arange(20), 10))
    assert unanimous.low == pytest.approx(proportion("p", [1] * 20).low)


def test_the_bootstrap_draws_many_different_resamples() -> None:
    seen = set()
    values = pd.DataFrame({"x": rng().normal(size=24)})

    def watched(rows: pd.DataFrame) -> float:
        seen.add(tuple(sorted(rows.index)))
        return float(rows["x"].mean())

    effect = bootstrapped("b", values, watched, statistics=StatisticsConfig(resamples=999))
    assert len(seen) > 900
    assert effect.method == "cluster bootstrap"
    t = mean("x", values["x"])
    assert effect.high - effect.low == pytest.approx(t.high - t.low, rel=0.2)


def test_the_bootstrap_is_seeded_and_touches_no_global_state() -> None:
    rows = pd.DataFrame({"x": rng().normal(size=24)})
    settings = StatisticsConfig(resamples=999, seed=5)

    def of(rows: pd.DataFrame) -> float:
        return float(rows["x"].std())

    first = bootstrapped("b", rows, of, statistics=settings)
    np.random.seed(0)  # noqa: NPY002 - the point is that it does nothing
    before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr] # noqa: NPY002
    assert bootstrapped("b", rows, of, statistics=settings) == first
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index] # noqa: NPY002
    other = bootstrapped("b", rows, of, statistics=settings.model_copy(update={"seed": 6}))
    assert (other.low, other.high) != (first.low, first.high)
    assert first.seed == 5


def test_clusters_are_resampled_whole() -> None:
    rows = pd.DataFrame({"x": range(60), "c": np.repeat(np.arange(20), 3)})

    def whole(sample: pd.DataFrame) -> float:
        assert (sample.groupby("c").size() % 3 == 0).all()
        return float(sample["x"].mean())

    bootstrapped("b", rows, whole, clusters=rows["c"], statistics=StatisticsConfig(resamples=999))


def test_the_jackknife_of_a_mean_is_the_t_interval() -> None:
    rows = pd.DataFrame({"x": rng().normal(size=10)})
    effect = bootstrapped("b", rows, lambda sample: float(sample["x"].mean()))
    t = mean("x", rows["x"])
    assert effect.method == "cluster jackknife t"
    assert (effect.low, effect.high) == pytest.approx((t.low, t.high))


def test_a_constant_statistic_bootstraps_to_itself() -> None:
    rows = pd.DataFrame({"x": [1.0] * 24})
    settings = StatisticsConfig(resamples=999)
    effect = bootstrapped("b", rows, lambda r: float(r["x"].mean()), noise_floor=0.01, statistics=settings)
    assert (effect.low, effect.high) == pytest.approx((0.99, 1.01))


def test_a_maximum_is_what_it_is() -> None:
    effect = maximum("m", [0.0, 0.0, 0.0], unit="logits")
    assert (effect.low, effect.estimate, effect.high, effect.n, effect.method) == (0.0, 0.0, 0.0, 3, "exact")


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [1.0, math.inf]])
def test_what_is_no_sample(bad: list[float]) -> None:
    for estimator in (mean, median, maximum, proportion):
        with pytest.raises(ValueError, match="x: "):
            estimator("x", bad)


def test_mismatches_are_refused() -> None:
    with pytest.raises(ValueError, match="2 shifts for 3 gaps"):
        ratio_of_sums("r", [1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="gaps sum to zero"):
        ratio_of_sums("r", [1, 2], [1, -1])
    with pytest.raises(ValueError, match="a gap is zero"):
        mean_of_ratios("r", [1, 2], [1, 0])
    with pytest.raises(ValueError, match="1 cluster labels for 2 rows"):
        mean("x", [1, 2], clusters=["a"])
    with pytest.raises(ValueError, match="label is missing"):
        mean("x", [1, 2], clusters=["a", None])
    with pytest.raises(ValueError, match="no rows"):
        bootstrapped("b", pd.DataFrame({"x": []}), lambda rows: 0.0)


def test_an_effect_is_a_number_inside_its_interval() -> None:
    with pytest.raises(ValueError, match="lies outside"):
        Effect(Label.of("x"), 2.0, 0.0, 1.0, 3, 3)
    with pytest.raises(ValueError, match="not a number"):
        Effect(Label.of("x"), math.nan, 0.0, 1.0, 3, 3)
    shown = str(Effect(Label.of("x"), 0.5, 0.0, 1.0, 3, 3, excluded=2, unit="logits"))
    assert shown == "0.500 logits [0.000, 1.000], n = 3, 3 clusters, 2 excluded"
