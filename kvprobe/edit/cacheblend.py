"""CacheBlend-style: the share of tokens that the change disturbs most is recomputed (section 5, critique ED2).

After Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion" (2024): tokens
are chosen by how much their entries change in the first layer that attends, and run through all layers with write-back.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from kvprobe.edit import base
from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, FieldEdit
from kvprobe.edit.selection import candidates
from kvprobe.edit.selective import Selective


@EDIT_METHODS.register("cacheblend")
class CacheBlend(Selective):
    """Overwrite the field and recompute the share of tokens that deviates most in the first attending layer."""

    name: ClassVar[str] = "cacheblend"

    class Parameters(base.Parameters):
        """How large a share."""

        share: float = Field(0.15, gt=0, le=1, description="share of the tokens after the field to recompute")

        @property
        def criterion(self) -> str:
            """As in the method's article."""
            return "first_layer_deviation"

    def count(self, stale: CachedPrompt, edit: FieldEdit) -> int:
        """The share, rounded up."""
        return math.ceil(self.parameters.share * len(candidates(stale, edit)))
