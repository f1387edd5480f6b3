"""Panels give figures the effects of a condition by its parameter, without taking a name apart."""

from __future__ import annotations

import pandas as pd

from kvprobe.figures.panel import Panel
from kvprobe.stats import Effect, Sample, StatisticsConfig


def panel() -> Panel:
    rows = pd.DataFrame(
        {"pair": pair, "skeleton": f"s{pair}", "arm": arm, "size": size, "right": pair % size == 0}
        for pair in range(10)
        for arm in ("edited", "stale")
        for size in (4, 1, 2)
    )
    sample = Sample.of_model(rows, StatisticsConfig())
    effects = [part.rate("{arm}.size_{size}.rate", "right") for *_, part in sample.by("arm", "size")]
    return Panel("a", {effect.name: effect for effect in effects}, rows)


def sizes(curve: dict[float, Effect]) -> list[float]:
    return list(curve)


def test_a_curve_is_ordered_by_the_parameter_that_is_left() -> None:
    curve = panel().curve("{arm}.size_{size}", "rate", arm="edited")
    assert sizes(curve) == [1, 2, 4]
    assert [effect.name for effect in curve.values()] == [f"edited.size_{size}.rate" for size in (1, 2, 4)]


def test_nothing_is_an_empty_curve() -> None:
    assert panel().curve("{arm}.size_{size}", "other", arm="edited") == {}
    assert panel().curve("{arm}.size_{size}", "rate", arm="nobody") == {}
    assert Panel("b").select("x", "y") == []


def test_the_rows_of_an_effect() -> None:
    shown = panel()
    (effect,) = shown.select("{arm}.size_{size}", "rate", arm="stale", size=2)
    rows = shown.rows_of(effect)
    assert len(rows) == effect.n == 10
    assert set(rows["arm"]) == {"stale"}
