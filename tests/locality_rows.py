"""Rows of the locality probe made by hand."""

from __future__ import annotations

import pandas as pd

from kvprobe.probes.mechanism.locality.probe import INTERVENTIONS


def made_rows(field: float, rest: float, gaps: list[float]) -> pd.DataFrame:
    """Rows of pairs whose base has margin -1, and which recover just so."""
    rows = []
    recoveries = dict(zip(INTERVENTIONS, (field, rest, 1.0, 0.0, 0.0), strict=True))
    for pair, gap in enumerate(gaps):
        common = {"pair": pair, "skeleton": f"s{pair}", "m_base": -1.0, "m_donor": gap - 1.0, "noise_floor": 1e-9}
        for name, recovery in recoveries.items():
            margin = recovery * gap - 1.0
            rows.append(
                {**common, "measurement": "decision", "intervention": name, "margin": margin, "flipped": margin > 0}
            )
        change = dict.fromkeys(("change_keys", "change_values", "relative_keys", "relative_values"), 0.0)
        rows.append({**common, "measurement": "cache_change", "region": "before", "layer": 0, **change})
    return pd.DataFrame(rows)
