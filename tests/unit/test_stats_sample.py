"""Samples make effects that know their rows: applying the filter again to the whole table gives the same effect."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.stats import Effect, Label, RowFilter, Sample, StatisticsConfig, mean, ratio_of_sums

STATISTICS = StatisticsConfig()


def table(pairs: int = 12, sizes: tuple[int, ...] = (1, 2, 4)) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "pair": pair,
            "skeleton": f"s{pair // 2}",
            "arm": arm,
            "size": float(size),
            "margin": float(pair * size + (arm == "edited")),
            "m_base": -1.0 - pair,
            "m_donor": 3.0 + pair,
            "noise_floor": 0.01 * pair,
            "right": (pair + size) % 3 > 0,
            "depth": None if size == 4 else float(size),
        }
        for pair in range(pairs)
        for arm in ("edited", "stale")
        for size in sizes
    )


def sample() -> Sample:
    return Sample.of_model(table(), STATISTICS)


@given(
    arms=st.lists(st.sampled_from(["edited", "stale"]), min_size=1, unique=True),
    sizes=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, unique=True),
    measured=st.booleans(),
)
def test_an_effect_is_made_again_from_its_filter(arms: list[str], sizes: list[float], measured: bool) -> None:
    part = sample().of(arm=arms).of(size=sizes)
    part = part.measured("depth") if measured else part
    if not len(part):
        return
    effect = part.recovery("some.recovery")
    stored = Effect.from_record(json.loads(json.dumps(effect.to_record())))
    assert stored == effect
    assert stored.rows is not None
    rows = stored.rows.select(table())
    assert len(rows) == effect.n
    assert Sample(rows, STATISTICS, stored.rows, floor=part.floor).recovery("some.recovery") == effect


def test_an_estimator_gives_what_it_gives_without_a_sample() -> None:
    rows = table()
    part = rows[rows["arm"] == "edited"]
    plain = ratio_of_sums(
        "edited.recovery",
        part["margin"] - part["m_base"],
        part["m_donor"] - part["m_base"],
        clusters=part["skeleton"],
        statistics=STATISTICS,
        noise_floor=0.11,
    )
    made = sample().of(arm="edited").recovery("edited.recovery")
    assert (made.estimate, made.low, made.high, made.noise_floor) == (
        plain.estimate,
        plain.low,
        plain.high,
        plain.noise_floor,
    )


def test_names_come_from_the_columns_that_chose_the_rows() -> None:
    names = [part.rate("{arm}_{size}.right_rate", "right").name for _, _, part in sample().by("arm", "size")]
    assert names == [f"{arm}_{size}.right_rate" for arm in ("edited", "stale") for size in (1, 2, 4)]
    effect = sample().of(arm="edited").named(percent=10).rate("suffix_{percent}.rate", "right")
    assert (effect.condition, effect.metric, dict(effect.parameters)) == ("suffix_{percent}", "rate", {"percent": 10})
    with pytest.raises(ValueError, match="no value for 'percent'"):
        sample().rate("suffix_{percent}.rate", "right")


def test_a_difference_is_over_what_both_conditions_share() -> None:
    rows = table()
    uneven = rows[(rows["arm"] == "edited") | (rows["pair"] > 3)]
    (effect,) = Sample.of_model(uneven, STATISTICS).difference(
        "edited.over_stale", "margin", "arm", "edited", "stale", unit="logits"
    )
    assert effect.estimate == pytest.approx(1.0)
    assert effect.n == 8
    assert effect.rows == RowFilter({"arm": ("edited", "stale")})
    assert not list(sample().difference("x.y", "margin", "arm", "edited", "nobody"))


def test_a_rule_of_the_reading_counts_what_it_leaves_out_and_keeps_the_filter() -> None:
    part = sample().of(arm="edited")
    kept = part.where(part.rows["margin"] > 3, exclude=True)
    effect = kept.mean("edited.margin", "margin", "logits")
    assert effect.excluded == len(part) - len(kept) > 0
    assert effect.rows == part.filter


def test_the_noise_is_counted_once_a_pair() -> None:
    effect = sample().noise()
    assert (effect.name, effect.n) == ("noise.margin", 12)
    assert effect.estimate == pytest.approx(0.11)


@given(st.lists(st.sampled_from(["a", "b", "c"]), unique=True), st.lists(st.sampled_from([0.5, 1.0]), unique=True))
def test_a_filter_survives_json_and_selects_what_it_says(words: list[str], numbers: list[float]) -> None:
    rows = pd.DataFrame({"word": ["a", "b", "c", "a"], "number": [0.5, 1.0, None, 1.0]})
    chosen = RowFilter().narrowed({"word": words, "number": numbers})
    again = RowFilter.from_record(json.loads(json.dumps(chosen.to_record())))
    assert again == chosen
    by_hand = [i for i, row in rows.iterrows() if row["word"] in words and row["number"] in numbers]
    assert list(again.select(rows).index) == by_hand


def test_a_filter_is_told_in_words() -> None:
    assert RowFilter().describe() == "all rows"
    told = RowFilter({"arm": ("edited",), "layer": (3, 4)}, ("lens",)).describe()
    assert told == "arm is edited, layer is one of 3, 4, lens was measured"


def test_a_label_from_a_plain_name() -> None:
    label = Label.of("think.long_context.new_rate")
    assert (label.condition, label.metric, str(label)) == (
        "think.long_context",
        "new_rate",
        "think.long_context.new_rate",
    )
    assert mean("single", [1.0, 2.0]).name == "single"
