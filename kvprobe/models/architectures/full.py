"""Architectures whose layers see the whole past."""

from __future__ import annotations

from typing import Any, ClassVar

from kvprobe.models.architectures.base import ARCHITECTURES, FULL, ArchitectureAdapter


@ARCHITECTURES.register("llama")
class Llama(ArchitectureAdapter):
    """Llama and models of its code (SmolLM2): grouped heads, full attention, optional RoPE scaling."""

    def layer_types(self, config: Any) -> tuple[str, ...]:
        """All layers are full: the model takes one mask."""
        return (FULL,) * int(config.num_hidden_layers)


@ARCHITECTURES.register("qwen2")
@ARCHITECTURES.register("qwen3")
class Qwen(ArchitectureAdapter):
    """Qwen2 and Qwen3 (normed queries and keys): full attention unless the configuration names sliding layers."""

    masks_by_layer_type: ClassVar[bool] = True
