"""Vision-language architectures: a position is a triple (temporal, height, width), and images stand among the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvprobe.errors import UnsupportedError
from kvprobe.models.architectures.base import ARCHITECTURES, FULL, ArchitectureAdapter
from kvprobe.models.architectures.moe import Qwen3Moe
from kvprobe.models.images import ImageFeatures
from kvprobe.models.rotary import RotaryTable


class MRope(ArchitectureAdapter):
    """Base of models with M-RoPE: each frequency turns by one axis of the position.

    Text stands at the same place on all three axes, so that it is rotated as under plain RoPE.
    """

    auto_class: ClassVar[str] = "AutoModelForImageTextToText"
    pixel_scale = ((0.5,) * 3, (0.5,) * 3)

    def rotary(self, model: Any) -> tuple[RotaryTable, ...]:
        """One table for all layers, with the axis of every frequency."""
        module = self.decoder(model).rotary_emb
        plain = RotaryTable.from_module(module)
        axes = self.frequency_axes(module.mrope_section, plain.inverse_frequencies.numel())
        table = replace(plain, frequency_axes=axes)
        return (table,) * len(self.decoder_layers(model))

    def frequency_axes(self, sections: Sequence[int], count: int) -> Tensor:
        """Which axis each of `count` frequencies turns by, `[count]`: 0 temporal, 1 height, 2 width."""
        raise NotImplementedError

    def generation_positions(self, positions: Tensor, axes: Tensor | None) -> Tensor:
        """`[4, 1, token]`: the place in the prompt, then the three axes."""
        return torch.cat([positions[None], positions.expand(3, -1) if axes is None else axes])[:, None]

    def decoder(self, model: Any) -> Any:
        """The language model beside the vision tower."""
        return model.model.language_model

    def image_inputs(self, model: Any, token_ids: Tensor, images: Sequence[ImageFeatures]) -> dict[str, Any]:
        """Hands the features over as if the vision tower had just made them."""
        wanted, given = int((token_ids == model.config.image_token_id).sum()), sum(len(image) for image in images)
        if wanted != given:
            raise UnsupportedError(
                f"There are {wanted} image tokens to run and {given} image features; give the features of each image "
                "whose tokens are run."
            )
        return {"mm_encoder_outputs": {"image": self.encoder_output(images)}} if images else {}

    def encoder_output(self, images: Sequence[ImageFeatures]) -> Any:
        """The features of all images in the form the model's vision tower returns them."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=[image.embeddings for image in images])


@ARCHITECTURES.register("qwen2_vl")
@ARCHITECTURES.register("qwen2_5_vl")
class Qwen25VL(MRope):
    """Qwen2-VL and Qwen2.5-VL: M-RoPE in sections, a block of frequencies for each axis."""

    pixel_scale = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))

    masks_by_layer_type: ClassVar[bool] = True

    def frequency_axes(self, sections: Sequence[int], count: int) -> Tensor:  # noqa: ARG002 - the sections add up to it
        """Blocks of the given lengths, one axis after the other."""
        axes = torch.arange(len(sections)) % 3
        return axes.repeat_interleave(torch.tensor(list(sections)))


@ARCHITECTURES.register("qwen3_vl")
class Qwen3VL(MRope):
    """Qwen3-VL: interleaved M-RoPE, and image features that enter the first layers once more (DeepStack)."""

    def layer_types(self, config: Any) -> tuple[str, ...]:
        """All layers are full: the model takes one mask."""
        return (FULL,) * int(config.num_hidden_layers)

    def frequency_axes(self, sections: Sequence[int], count: int) -> Tensor:
        """Height and width take every third frequency, as many as their sections say; the rest is temporal."""
        axes = torch.zeros(count, dtype=torch.long)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes

    def encoder_output(self, images: Sequence[ImageFeatures]) -> Any:
        """With the features for the first layers, each `[token, hidden]` over all images."""
        layers = zip(*(image.deep for image in images), strict=True)
        return self.deep_output()(
            pooler_output=[image.embeddings for image in images],
            deepstack_features=[list(features) for features in layers],
        )

    def deep_output(self) -> Any:
        """The form in which the model's vision tower returns features for several layers."""
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        return BaseModelOutputWithDeepstackFeatures


@ARCHITECTURES.register("qwen3_vl_moe")
class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL-MoE: Qwen3-VL with mixtures of experts among its MLPs."""

    has_experts: ClassVar[bool] = True

    def mlp_flops_per_token(self, config: Any) -> int:
        """As the configuration spreads dense and sparse layers."""
        return Qwen3Moe().mlp_flops_per_token(config)

    def deep_output(self) -> Any:
        """As of Qwen3-VL, in its own module."""
        from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import BaseModelOutputWithDeepstackFeatures

        return BaseModelOutputWithDeepstackFeatures
