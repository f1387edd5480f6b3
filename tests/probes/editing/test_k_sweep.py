"""Laws of the K-sweep: fits against an independent one, K* and its interval, and sweeps against the edit methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import effects_of, gated, margin_behind, measured, worded

from kvprobe.probes.editing.k_sweep.probe import COPY, REFERENCES, KSweep
from kvprobe.probes.editing.k_sweep.smallest_size import monotone, smallest_within
from kvprobe.probes.kit.edit_arms import make_arm, run_arm
from kvprobe.probes.kit.edit_cases import edit_case
from kvprobe.stats import Effect, Label

SIZES = (0, 1, 4, 16)
(PAIR,) = gated()


def swept(family: str = "qwen3", **parameters: Any) -> pd.DataFrame:
    probe = KSweep(**{"sizes": SIZES, "criteria": ("suffix",), **parameters})
    return measured(probe, worded(family), [PAIR]).set_index("arm")


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_the_fit_is_the_nearest_curve_that_never_falls(counts: list[int]) -> None:
    """By the max-min formula of isotonic regression, which knows nothing of pooling."""
    rates = np.array(counts) / 20
    ought = [
        max(min(rates[i : j + 1].mean() for j in range(k, len(rates))) for i in range(k + 1)) for k in range(len(rates))
    ]
    np.testing.assert_allclose(monotone(rates), ought, atol=1e-12)


def test_the_sweep_runs_the_edit_methods_and_ends_at_the_oracle() -> None:
    subject, pair, found = worded("qwen3"), PAIR, swept(sizes=(0, 3, 999))
    case = edit_case(subject, pair)
    alone = run_arm(subject, case, make_arm("alone", "field_only"))
    three = run_arm(subject, case, make_arm("three", "selective", k=3, criterion="suffix"))
    assert found["margin"]["suffix_0"] == pytest.approx(alone["margin"], abs=1e-9)
    assert found["margin"]["suffix_3"] == pytest.approx(three["margin"], abs=1e-9)
    oracle = margin_behind(subject, pair, pair.donor.token_ids)
    assert found["margin"]["suffix_999"] == pytest.approx(oracle, abs=1e-9)
    assert found["recomputed"]["suffix_999"] == len(pair.base.token_ids) - 1 - pair.field.end
    assert {*REFERENCES, "suffix_0", "suffix_3", "suffix_999"} == set(found.index)


def test_the_upper_bound_copies_what_attention_chooses() -> None:
    subject, found = worded("qwen3"), swept(sizes=(0, 5), criteria=("decision_attention",))
    case = edit_case(subject, PAIR)
    copy = run_arm(subject, case, make_arm("copy", "oracle_copy", k=5, criterion="decision_attention"))
    assert found["margin"][f"{COPY}_5"] == pytest.approx(copy["margin"], abs=1e-9)
    assert found["margin"][f"{COPY}_5"] != found["margin"]["decision_attention_5"]
    assert found["margin"][f"{COPY}_0"] == pytest.approx(found["margin"]["decision_attention_0"], abs=1e-9)


def made_rows(right: dict[str, float], pairs: int = 24, after: int = 40) -> pd.DataFrame:
    """Rows in which each arm decides the first so many pairs rightly."""
    rows = crossed(pairs, arm=[*REFERENCES, *(f"suffix_{size}" for size in SIZES)])
    correct, size = rows["pair"] < rows["arm"].map(right).fillna(0) * pairs, rows["arm"].str.extract(r"_(\d+)$")[0]
    criterion = rows["arm"].where(size.isna(), "suffix")
    swept = {"criterion": criterion, "size": size.astype(float), "after_field": size.notna().map({True: after})}
    return rows.assign(margin=4.0 * correct - 2.0, correct=correct, **swept)


def read(rows: pd.DataFrame) -> dict[str, Effect]:
    return effects_of(KSweep(sizes=SIZES, criteria=("suffix",)), rows, resamples=999)


def test_k_star_is_where_the_fit_reaches_the_erratum() -> None:
    """The dip at 4 is noise to a fit that cannot fall: 1 and 4 share their mean."""
    shares = {"erratum": 1.0, "field_and_erratum": 0.5, "suffix_1": 0.75, "suffix_4": 0.25, "suffix_16": 1.0}
    effects = read(made_rows(shares))
    fitted = [effects[f"suffix_{size}.over_erratum.difference"].estimate for size in SIZES]
    assert fitted == pytest.approx([-1.0, -0.5, -0.5, 0.0])
    assert effects["suffix.k_star_erratum"].estimate == 16
    assert effects["suffix.k_star_field_and_erratum"].estimate == 1
    assert effects["suffix_1.correct_rate"].estimate == effects["suffix_1.recovery"].estimate == 0.75


def test_where_no_size_is_enough_all_tokens_are() -> None:
    effects = read(made_rows({"erratum": 1.0, "suffix_16": 0.5}))
    star = effects["suffix.k_star_erratum"]
    assert (star.estimate, star.low, star.high) == (40.0, 40.0, 40.0)
    assert star.unit == "tokens"


def test_few_skeletons_that_all_agree_prove_no_equivalence() -> None:
    """Eight of eight may hide a share of almost a third, so the interval reaches beyond the margin."""
    everything = {"erratum": 1.0, **{f"suffix_{size}": 1.0 for size in SIZES}}
    few, many = (read(made_rows(everything, pairs))["suffix.k_star_erratum"] for pairs in (8, 24))
    assert (few.estimate, few.low, few.high) == (0.0, 0.0, 40.0)
    assert (many.estimate, many.low, many.high) == (0.0, 0.0, 0.0)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_the_interval_of_k_star_holds_it(points: list[tuple[float, float]]) -> None:
    differences = [
        Effect(Label.of(f"d{k}"), value, value - half, value + half, n=10, clusters=10)
        for k, (value, half) in enumerate(points)
    ]
    star = smallest_within(Label.of("k"), range(len(points)), differences, -0.1, 50.0)
    enough = [k for k, (value, half) in enumerate(points) if value - half >= -0.1]
    assert star.high == (enough[0] if enough else 50.0)
    assert star.low <= star.estimate <= star.high
