"""Rows of decisions made by hand, whose effects are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
