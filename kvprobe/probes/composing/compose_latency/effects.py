"""What the rows of the compose latency probe add up to."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvprobe.probes.kit.measures import pair_noise
from kvprobe.stats import Effect, StatisticsConfig, mean
from kvprobe.stats.growth import growth_exponent

REFERENCE, OVERHEAD, TWO_PIECES, COMPILE = "full_prefill", "without_chunk", "two_pieces", "compile"
REPEATED = "repeated"
"""Text of a chunk that repeats the entries of another, and has no full prefill to be compared with."""
GROWING = (REFERENCE, "splice", "splice_from_disk")
_KEY = ["pair", "text", "length"]


def latency_effects(rows: pd.DataFrame, statistics: StatisticsConfig, long_lengths: int = 2048) -> list[Effect]:
    """All effects of one model; `rows` as `ComposeLatency.measure` gives them.

    `X.exponent_long` is over chunks of `long_lengths` tokens and more.
    """
    timed, compiled = rows[rows["arm"] != COMPILE], rows[rows["arm"] == COMPILE]
    for name, suffix in ((REFERENCE, "_full"), (OVERHEAD, "_alone"), (TWO_PIECES, "_two_pieces")):
        other = timed[timed["arm"] == name].set_index(_KEY)[["seconds", "flops"]]
        timed = timed.join(other.add_suffix(suffix), on=_KEY)
    one_pass = timed["arm"] == REFERENCE
    timed = timed.assign(
        speedup=timed["seconds_full"] / timed["seconds"],
        flop_share=timed["flops"] / timed["flops_full"],
        added_seconds=timed["seconds"] - timed["seconds_alone"].where(one_pass, timed["seconds_two_pieces"]),
        added_flops=timed["flops"] - timed["flops_alone"].where(one_pass, timed["flops_two_pieces"]),
    )
    effects = [
        *_by_length(timed, statistics),
        *_exponents(timed[timed["text"] != "text"], statistics, long_lengths),
        *_preparing(timed[timed["text"] == "random"], compiled[compiled["text"] == "random"], statistics),
    ]
    effects.append(pair_noise(rows, statistics))
    return effects


def _by_length(timed: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    for (text, arm, length), part in timed.groupby(["text", "arm", "length"], sort=False):
        clusters = part[statistics.cluster]
        name = f"{arm}_{length}" if text == "random" else f"{arm}_{text}_{length}"
        if arm != REFERENCE and text != REPEATED:
            yield mean(f"{name}.speedup", part["speedup"], clusters=clusters, statistics=statistics, unit="x")
            yield mean(f"{name}.flop_share", part["flop_share"], clusters=clusters, statistics=statistics)
        yield mean(f"{name}.seconds", part["seconds"], clusters=clusters, statistics=statistics, unit="s")


def _exponents(timed: pd.DataFrame, statistics: StatisticsConfig, long_lengths: int) -> Iterator[Effect]:
    for arm in GROWING:
        of_arm = timed[timed["arm"] == arm]
        part = of_arm[of_arm["text"] != REPEATED]
        for name, column in (
            ("exponent", "added_seconds"),
            ("exponent_raw", "seconds"),
            ("flop_exponent", "added_flops"),
        ):
            yield from _exponent(f"{arm}.{name}", part["length"], part[column], statistics)
        long = of_arm[of_arm["length"] >= long_lengths]
        yield from _exponent(f"{arm}.exponent_long", long["length"], long["added_seconds"], statistics)
    key = ["pair", "length"]
    random = timed[timed["text"] != REPEATED]
    full, splice = (random[random["arm"] == arm].set_index(key)["added_seconds"] for arm in (REFERENCE, "splice"))
    both = (full > 0) & (splice > 0)
    ratio = (full[both] / splice[both]).rename("ratio").reset_index()
    yield from _exponent("full_over_splice.exponent", ratio["length"], ratio["ratio"], statistics)


def _exponent(name: str, lengths: pd.Series, costs: pd.Series, statistics: StatisticsConfig) -> Iterator[Effect]:
    """The exponent over the rows in which the chunk cost anything at all; nothing where too few are left."""
    kept = costs > 0
    if kept.sum() >= 3 and lengths[kept].nunique() >= 2:
        left_out = int((~kept).sum())
        yield growth_exponent(name, lengths[kept], costs[kept], statistics=statistics, excluded=left_out)


def _preparing(timed: pd.DataFrame, compiled: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """What a chunk costs once, and how many uses of it win that back.

    Each use wins the difference between a full prefill and a splice from disk.
    """
    for length, part in compiled.groupby("length", sort=True):
        for effect, column, unit in (
            (f"compile_{length}.seconds", "seconds", "s"),
            (f"save_{length}.seconds", "save_seconds", "s"),
            (f"storage_{length}.bytes", "bytes", "bytes"),
        ):
            yield mean(effect, part[column], clusters=part[statistics.cluster], statistics=statistics, unit=unit)
        once = float((part["seconds"] + part["save_seconds"]).iloc[0])
        stored = timed[(timed["arm"] == "splice_from_disk") & (timed["length"] == length)]
        won = stored["seconds_full"] - stored["seconds"]
        if (won > 0).all() and len(won):
            clusters = stored[statistics.cluster]
            yield mean(f"pays_off_{length}.uses", once / won, clusters=clusters, statistics=statistics, unit="uses")
