"""How often a reading of both prompts of a pair is right."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvprobe.stats import Effect, Sample

PROMPTS = ("right_base", "right_donor")
"""Columns that say whether the base and the donor prompt were read correctly."""


def right_share(rows: pd.DataFrame) -> pd.Series:
    """[row] share of the two prompts that were read correctly."""
    return rows[list(PROMPTS)].astype(float).mean(axis=1)


def accuracy(sample: Sample, name: str) -> Iterator[Effect]:
    """The share of prompts that were read correctly, each prompt counted; nothing where there are none."""
    if len(sample):
        sides = [sample.rows.assign(right=sample.rows[column]) for column in PROMPTS]
        yield sample.table(pd.concat(sides)).rate(name, "right")
