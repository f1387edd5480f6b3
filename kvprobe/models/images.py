"""Images as a language model sees them: one vector for each image token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """What a vision tower makes of one image: one vector for each image token of the prompt.

    Attributes:
        embeddings: `[token, hidden]`, which stand in place of the image tokens' own embeddings.
        grid: rows and columns of image tokens; they are in reading order.
        deep: for each of the first decoder layers `[token, hidden]`, added to its output (DeepStack of Qwen3-VL).
    """

    embeddings: Tensor
    grid: tuple[int, int]
    deep: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        tokens = self.grid[0] * self.grid[1]
        if any(len(vectors) != tokens for vectors in (self.embeddings, *self.deep)):
            raise UnsupportedError(f"A grid of {self.grid} needs {tokens} image tokens, not {len(self.embeddings)}.")

    def __len__(self) -> int:
        return len(self.embeddings)

    def axes(self, start: int) -> Tensor:
        """`[3, token]`: temporal, height and width position of each image token when the image begins at `start`.

        Source: `get_vision_position_ids` of the Qwen-VL models, for still images.
        """
        rows, columns = self.grid
        place = torch.stack(
            [
                torch.zeros(len(self), dtype=torch.long),
                torch.arange(rows).repeat_interleave(columns),
                torch.arange(columns).repeat(rows),
            ]
        )
        return place + start
