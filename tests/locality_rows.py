"""Rows of the locality probe made by hand."""

from __future__ import annotations

import pandas as pd
from made_rows import made_rows as made_decisions

from kvprobe.probes.mechanism.locality.probe import INTERVENTIONS


def made_rows(field: float, rest: float, gaps: list[float]) -> pd.DataFrame:
    """Rows of pairs whose base has margin -1, and which recover just so."""
    recoveries = zip(INTERVENTIONS, (field, rest, 1.0, 0.0, 0.0), strict=True)
    cases = [{"intervention": name, "recovery": recovery} for name, recovery in recoveries]
    decisions = made_decisions(cases, gaps=gaps, base=-1.0)
    change = dict.fromkeys(("change_keys", "change_values", "relative_keys", "relative_values"), 0.0)
    once = decisions[decisions["intervention"] == INTERVENTIONS[0]].drop(columns=["intervention", "margin", "flipped"])
    changes = once.assign(measurement="cache_change", region="before", layer=0, **change)
    return pd.concat([decisions, changes], ignore_index=True)
