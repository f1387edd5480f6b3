"""Scissorhands (Liu et al., 2023, arXiv 2305.17118): entries that mattered often in a window of history will matter."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvprobe.eviction.base import EVICTION_METHODS, EvictionMethod, Observed, last


@EVICTION_METHODS.register("scissorhands")
class Scissorhands(EvictionMethod):
    """Keep the entries that got more than average attention in most steps of the history, and the most recent ones."""

    name: ClassVar[str] = "scissorhands"

    history_window: int = Field(32, ge=1, description="last queries whose attention counts")
    recent_window: int = Field(10, ge=0, description="last entries that stay")

    def scores(self, observed: Observed, kept: int) -> Tensor:
        """`[layer, position]`: in how many steps the entry got more than the average, recent entries above all."""
        attention = observed.attention[:, -self.history_window :]
        seen = torch.arange(len(observed) - attention.shape[1], len(observed)) + 1.0
        average = attention.sum(-1, keepdim=True) / seen[:, None].to(attention)
        return (attention > average).float().sum(1) + last(observed, min(self.recent_window, kept))
