"""H2O (Zhang et al., 2023, arXiv 2306.14048): the entries that attention has gone to most, and recent ones.

The paper evicts while it reads; here the choice is made once, at the end of the prefill.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from kvprobe.eviction.base import EVICTION_METHODS, EvictionMethod, Observed, last


@EVICTION_METHODS.register("h2o")
class H2O(EvictionMethod):
    """Keep the entries with the most accumulated attention, and the most recent ones."""

    name: ClassVar[str] = "h2o"

    recent_ratio: float = Field(0.5, ge=0, le=1, description="share of the budget for the most recent entries")

    def scores(self, observed: Observed, kept: int) -> Tensor:
        """`[layer, position]`: attention of all queries, the recent entries above all."""
        return observed.attention.sum(1) + last(observed, int(self.recent_ratio * kept))
