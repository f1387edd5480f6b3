"""SnapKV (Li et al., 2024, arXiv 2404.14469): what the end of the prompt looks at, neighbours pooled."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvprobe.eviction.base import EVICTION_METHODS, EvictionMethod, Observed, last


@EVICTION_METHODS.register("snapkv")
class SnapKV(EvictionMethod):
    """Keep what an observation window at the end of the prompt attends to, and the window."""

    name: ClassVar[str] = "snapkv"

    window_size: int = Field(16, ge=1, description="last queries whose attention counts, and whose entries stay")
    kernel_size: int = Field(5, ge=1, description="neighbours whose attention is pooled, an odd number")

    @field_validator("kernel_size")
    @classmethod
    def _odd(cls, size: int) -> int:
        if size % 2 == 0:
            raise ValueError("it must be odd, so that it has a middle")
        return size

    def scores(self, observed: Observed, kept: int) -> Tensor:
        """`[layer, position]`: pooled attention of the window's queries, the window above all."""
        window = min(self.window_size, kept)
        votes = observed.attention[:, -window:].sum(1)
        votes = max_pool1d(votes, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return votes + last(observed, window).to(votes)
