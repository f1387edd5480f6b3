"""Architectures with sliding windows: all keys are kept, the mask enforces the window."""

from __future__ import annotations

from typing import Any, ClassVar

from kvprobe.models.architectures.base import ARCHITECTURES, FULL, SLIDING, ArchitectureAdapter


@ARCHITECTURES.register("mistral")
class Mistral(ArchitectureAdapter):
    """Mistral: every layer slides when the configuration has a window, none otherwise."""

    def layer_types(self, config: Any) -> tuple[str, ...]:
        """The same type for all layers."""
        return (FULL if config.sliding_window is None else SLIDING,) * int(config.num_hidden_layers)


@ARCHITECTURES.register("gemma2")
class Gemma2(ArchitectureAdapter):
    """Gemma-2: alternating windows and soft-capped scores, which only the eager kernel computes."""

    masks_by_layer_type: ClassVar[bool] = True
    attention_backends: ClassVar[tuple[str, ...]] = ("eager",)


@ARCHITECTURES.register("gemma3_text")
class Gemma3(ArchitectureAdapter):
    """Gemma-3, text only: alternating windows with one RoPE base for local and one for global layers."""

    masks_by_layer_type: ClassVar[bool] = True


@ARCHITECTURES.register("gemma3")
class Gemma3WithVision(Gemma3):
    """Gemma-3 with a vision tower, on text alone: tokens of an image see one another, which kvprobe's masks do not."""

    auto_class: ClassVar[str] = "AutoModelForImageTextToText"

    def decoder(self, model: Any) -> Any:
        """The language model beside the vision tower."""
        return model.model.language_model
