"""Laws of the suffix concentration probe, shares on rows made by hand, and plain Hugging Face in float64."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rows import made_rows
from worded_models import gated, margin_behind, measured, plain_margin, worded

from kvprobe.probes.mechanism.suffix_concentration.probe import SuffixConcentration
from kvprobe.probes.mechanism.suffix_concentration.reading import position_shares
from kvprobe.stats import Effect, Sample, StatisticsConfig
from kvprobe.tasks.pairs import Pair

SMALL = SuffixConcentration(
    fractions=(0.1, 0.5, 1.0), sizes=(1, 4), control_size=4, matched_draws=3, random_draws=2, folds=2
)


def pairs_of(size: int) -> list[Pair]:
    return gated(size, notes_before=(0, 0), notes_after=(0, 1))


@cache
def rows_of(family: str, seed: int = 0) -> pd.DataFrame:
    return measured(SMALL.model_copy(update={"seed": seed}), worded(family), pairs_of(3))


def of(rows: pd.DataFrame, intervention: str) -> pd.DataFrame:
    return rows[rows["intervention"] == intervention].set_index("pair")


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2"])
def test_identities(family: str) -> None:
    rows = rows_of(family)
    for whole in ("suffix_100", "prefix_100", "up_to_layer_{}", "from_layer_0"):
        part = of(rows, whole.format(worded(family).layers - 1))
        assert part["margin"].to_numpy() == pytest.approx(part["m_donor"].to_numpy(), abs=1e-6)
    for nothing in ("no_op", "same_value"):
        part = of(rows, nothing)
        assert part["margin"].to_numpy() == pytest.approx(part["m_base"].to_numpy(), abs=1e-6)
    assert rows["noise_floor"].max() < 1e-6
    # A single position from the field on, a segment of one token: the same set twice.
    field = rows[(rows["intervention"] == "position") & (rows["segment"] == "field")].set_index("pair")
    assert field["margin"].to_numpy() == pytest.approx(of(rows, "segment_field")["margin"].to_numpy(), abs=1e-6)


def test_every_position_from_the_field_on_is_measured_once() -> None:
    rows, pairs = rows_of("qwen3"), pairs_of(3)
    singles = rows[rows["intervention"] == "position"]
    for index, pair in enumerate(pairs):
        places = singles[singles["pair"] == index]["position"].tolist()
        assert places == list(range(pair.field.start, pair.decision_position))
        assert of(rows, "suffix_10")["positions"][index] == math.ceil(len(places) / 10)


def test_the_best_position_of_a_pair_is_its_top_one() -> None:
    rows = rows_of("llama")
    singles = rows[rows["intervention"] == "position"]
    toward = singles["margin"] * np.sign(singles["m_donor"] - singles["m_base"])
    best = singles.loc[toward.groupby(singles["pair"]).idxmax()].set_index("pair")["margin"]
    decided = of(rows, "top_in_sample_1")
    expected = best.where(decided["m_donor"] > decided["m_base"])
    right = expected.notna()
    assert right.any()
    assert decided["margin"][right].to_numpy() == pytest.approx(expected[right].to_numpy(), abs=1e-6)


def test_the_seed_decides_the_random_sets_and_nothing_else() -> None:
    first, second = rows_of("qwen3", seed=0), rows_of("qwen3", seed=1)
    for name in ("random_4", "matched_4"):
        assert not np.allclose(of(first, name)["margin"], of(second, name)["margin"])
    fixed = ~first["intervention"].str.contains(r"random|matched|held_out")
    assert first[fixed]["margin"].to_numpy() == pytest.approx(second[fixed]["margin"].to_numpy(), abs=1e-9)


def test_against_plain_hugging_face() -> None:
    """A suffix of half the positions, and one position, on one pair."""
    rows, pair, subject = rows_of("qwen3"), pairs_of(3)[0], worded("qwen3")
    span = range(pair.field.start, pair.decision_position)
    place = pair.base.spans["policy"].end - 1
    for name, positions in {"suffix_50": span[-math.ceil(len(span) / 2) :], "position": [place]}.items():
        found = rows[(rows["pair"] == 0) & (rows["intervention"] == name)]
        found = found[found["position"] == place] if name == "position" else found
        expected = plain_margin(subject, pair, positions)
        assert found["margin"].item() == pytest.approx(expected, abs=1e-9)
        for column, prompt in (("m_base", pair.base), ("m_donor", pair.donor)):
            assert found[column].item() == pytest.approx(margin_behind(subject, pair, prompt.token_ids), abs=1e-9)
        assert expected != pytest.approx(found["m_base"].item(), abs=1e-9)


def single_rows(recoveries: list[float], segments: list[str], delimiters: list[bool]) -> pd.DataFrame:
    """Single positions that recover just so, in each of several pairs with different gaps."""
    columns = zip(recoveries, segments, delimiters, strict=True)
    cases = [
        {"intervention": "position", "position": position, "recovery": r, "segment": segment, "delimiter": mark}
        for position, (r, segment, mark) in enumerate(columns)
    ]
    return made_rows(cases, gaps=[2.0 + pair for pair in range(9)], base=-1.0)


def shares_of(rows: pd.DataFrame) -> dict[str, Effect]:
    return {effect.name: effect for effect in position_shares(Sample.of_model(rows, StatisticsConfig()))}


@given(recoveries=st.lists(st.floats(-0.3, 0.9), min_size=4, max_size=4).filter(lambda r: max(r) > 0.01))
def test_shares_are_of_the_positive_part_and_densities_are_per_token(recoveries: list[float]) -> None:
    segments, delimiters = ["field", "policy", "policy", "task"], [False, False, True, False]
    shares = shares_of(single_rows(recoveries, segments, delimiters))
    positive = [max(recovery, 0.0) for recovery in recoveries]
    total = sum(positive)
    assert shares["mass.policy"].estimate == pytest.approx((positive[1] + positive[2]) / total, abs=1e-6)
    assert shares["mass.after_policy"].estimate == pytest.approx(positive[3] / total, abs=1e-6)
    assert shares["delimiter.share"].estimate == pytest.approx(positive[2] / total, abs=1e-6)
    assert shares["delimiter.density"].estimate == pytest.approx(4 * positive[2] / total, abs=1e-5)
    assert sum(shares[f"mass.{name}"].estimate for name in set(segments)) == pytest.approx(1.0)


def test_a_pair_without_any_recovery_is_excluded_and_told() -> None:
    rows = single_rows([0.2, 0.2], ["field", "policy"], [False, True])
    rows.loc[rows["pair"] == 0, "margin"] = -1.0
    effect = shares_of(rows)["mass.field"]
    assert (effect.excluded, effect.n) == (1, 8)
