"""What the rows of `erratum_security` say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from kvprobe.probes.kit.measures import pair_noise
from kvprobe.stats import Effect, StatisticsConfig, mean, proportion


def security_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """All effects of the probe but the baselines, from rows that passed the gate, with the cluster column."""
    attacks, clean = (rows[(rows["part"] == "attack") & ((rows["form"] == "none") == plain)] for plain in (False, True))
    for cell, part in attacks.groupby(["defence", "placement", "form"], sort=False):
        yield _share(f"{_dotted(cell)}.override_rate", part, part["margin"] > 0, statistics)
    for defence, part in attacks.groupby("defence", sort=False):
        yield _share(f"{defence!s}.override_rate", part, part["margin"] > 0, statistics)
    yield from _prevented(attacks, statistics)
    for defence, part in clean.groupby("defence", sort=False):
        yield _share(f"clean.{defence!s}.correct_rate", part, part["margin"] < 0, statistics)
        yield _tokens(f"{defence!s}.tokens", part, "extra_tokens", statistics)
    yield from _operator_effects(rows[rows["part"] != "attack"], statistics)
    yield pair_noise(rows, statistics)


def _prevented(attacks: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """By how much each defence lowers the rate of false overrides, over all forgeries of a pair."""
    overrides = attacks.assign(override=(attacks["margin"] > 0).astype(float))
    by_pair = overrides.pivot_table(index="pair", columns="defence", values="override", aggfunc="mean")
    clusters = attacks.groupby("pair")[statistics.cluster].first().loc[by_pair.index]
    for defence in [name for name in by_pair.columns if name != "none"]:
        prevented = by_pair["none"] - by_pair[defence]
        floor = 1 / len(prevented)
        yield mean(f"{defence!s}.prevented", prevented, clusters=clusters, statistics=statistics, noise_floor=floor)


def _operator_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    for names, cell in rows.groupby(["part", "method", "defence"], sort=False):
        yield _share(f"{_dotted(names)}.new_rate", cell, cell["margin"] > 0, statistics)
    plain = rows[(rows["part"] == "legitimate") & (rows["defence"] == "none")]
    for method, cell in plain.groupby("method", sort=False):
        yield _tokens(f"edit.{method!s}.tokens", cell, "edit_tokens", statistics)


def _dotted(names: Sequence[object]) -> str:
    return ".".join(str(name) for name in names)


def _share(name: str, rows: pd.DataFrame, decided: pd.Series, statistics: StatisticsConfig) -> Effect:
    return proportion(name, decided.astype(float), clusters=rows[statistics.cluster], statistics=statistics)


def _tokens(name: str, rows: pd.DataFrame, column: str, statistics: StatisticsConfig) -> Effect:
    values = rows[column].astype(float)
    return mean(name, values, clusters=rows[statistics.cluster], statistics=statistics, unit="tokens")
