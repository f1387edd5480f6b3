"""Architectures that rotate a part of each key: its first channels carry the position, the others none."""

from __future__ import annotations

from typing import Any, ClassVar

from kvprobe.models.architectures.base import ARCHITECTURES, FULL, ArchitectureAdapter


@ARCHITECTURES.register("stablelm")
class StableLm(ArchitectureAdapter):
    """StableLM: full attention, a part of each key rotated in half-split pairs."""

    def layer_types(self, config: Any) -> tuple[str, ...]:
        """All layers are full: the model takes one mask."""
        return (FULL,) * int(config.num_hidden_layers)


@ARCHITECTURES.register("glm")
class Glm(StableLm):
    """GLM-4: full attention, a part of each key rotated in adjacent pairs."""

    adjacent_pairs: ClassVar[bool] = True
