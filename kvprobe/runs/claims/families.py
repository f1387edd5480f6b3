"""p values of several verdicts adjusted together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvprobe.runs.claims.verdict import Verdict


def adjust(verdicts: Sequence[Verdict], false_discovery_rate: float = 0.05) -> list[Verdict]:
    """The verdicts of one experiment with p values adjusted: Benjamini-Hochberg over all, Holm over the headlines.

    `false_discovery_rate` is what the former are held against; the latter against 1 - confidence.
    """
    from kvprobe.stats import adjust_benjamini_hochberg

    adjusted = list(verdicts)
    tested = {i: verdict.p_value for i, verdict in enumerate(adjusted) if verdict.p_value is not None}
    for i, p in zip(tested, adjust_benjamini_hochberg(list(tested.values())), strict=True):
        level = adjusted[i].level if adjusted[i].headline else false_discovery_rate
        adjusted[i] = replace(adjusted[i], p_benjamini_hochberg=p, level=level)
    return adjust_headlines(adjusted)


def adjust_headlines(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, of one experiment or of several, with Holm's p over those on headline claims that count."""
    from kvprobe.stats import adjust_holm

    adjusted = list(verdicts)
    tested = {i: v.p_value for i, v in enumerate(adjusted) if v.headline and not v.shown_in and v.p_value is not None}
    for i, p in zip(tested, adjust_holm(list(tested.values())), strict=True):
        adjusted[i] = replace(adjusted[i], p_holm=p)
    return adjusted
