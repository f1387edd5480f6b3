"""StreamingLLM (Xiao et al., 2023, arXiv 2309.17453): attention sinks and the last entries."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvprobe.eviction.base import EVICTION_METHODS, EvictionMethod, Observed


@EVICTION_METHODS.register("streaming_llm")
class StreamingLLM(EvictionMethod):
    """Keep the first few entries and the most recent ones."""

    name: ClassVar[str] = "streaming_llm"

    n_sink: int = Field(4, ge=0, description="first entries that stay")

    def scores(self, observed: Observed, kept: int) -> Tensor:  # noqa: ARG002
        """`[position]`: the later the higher, the sinks above all."""
        scores = torch.arange(float(len(observed)))
        scores[: self.n_sink] = math.inf
        return scores
