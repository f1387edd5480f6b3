"""Controls: entries kept at random, or by the kind of their token alone."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvprobe.eviction.base import EVICTION_METHODS, EvictionMethod, Observed, only
from kvprobe.tasks.encoding import is_delimiter


@EVICTION_METHODS.register("random")
class Random(EvictionMethod):
    """Keep entries drawn at random, the same in all layers."""

    name: ClassVar[str] = "random"

    seed: int = Field(0, ge=0, description="of the draw")

    def scores(self, observed: Observed, kept: int) -> Tensor:  # noqa: ARG002
        """`[position]`: uniform draws."""
        return torch.rand(len(observed), generator=torch.Generator().manual_seed(self.seed))


@EVICTION_METHODS.register("delimiters")
class Delimiters(EvictionMethod):
    """Keep the last delimiters, tokens of punctuation and white space alone, and only then other tokens."""

    name: ClassVar[str] = "delimiters"

    dropped: bool = Field(default=False, description="whether delimiters are the first to go instead")

    def scores(self, observed: Observed, kept: int) -> Tensor:  # noqa: ARG002
        """`[position]`: kind of token first, then place."""
        tokenizer = observed.subject.tokenizer
        places = [n for n, token in enumerate(observed.token_ids) if is_delimiter(token, tokenizer) != self.dropped]
        return 2 * only(observed, places) + torch.linspace(0, 1, len(observed))
