"""Rows of decisions made by hand, whose effects are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pandas as pd


def made_rows(
    cases: Iterable[Mapping[str, Any]], *, gaps: Iterable[float] = (10.0,) * 10, base: float = -5.0
) -> pd.DataFrame:
    """A row for each pair and case.

    Args:
        cases: columns of each, with its `recovery`, from which the margin follows.
        gaps: of the pairs, in logits; each pair has a skeleton of its own.
        base: margin of every base prompt, in logits.
    """
    cases = list(cases)
    table = pd.DataFrame(
        {"pair": pair, "skeleton": f"s{pair}", "m_base": base, "m_donor": base + gap, **case}
        for pair, gap in enumerate(gaps)
        for case in cases
    )
    margin = base + table.pop("recovery") * (table["m_donor"] - base)
    return table.assign(measurement="decision", margin=margin, flipped=(margin > 0) != (base > 0), noise_floor=1e-9)


def crossed(pairs: int = 10, **columns: Iterable[Any]) -> pd.DataFrame:
    """A row for each pair and each combination of values; margins of the gate are -2 and 2, and baselines 1, 0 and 0.5."""
    rows = pd.DataFrame(product(range(pairs), *columns.values()), columns=["pair", *columns])
    known = {"m_base": -2.0, "m_donor": 2.0, "noise_floor": 1e-6}
    baselines = {"baseline_first_option": 1.0, "baseline_refuse": 0.0, "baseline_majority": 0.5}
    return rows.assign(skeleton="s" + rows["pair"].astype(str), **known, **baselines)
