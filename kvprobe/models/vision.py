"""Images for vision-language models: pixels cut into patches, and what the vision tower makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import UnsupportedError
from kvprobe.models.images import ImageFeatures
from kvprobe.models.subject import Subject


def patches(pixels: Tensor, vision_config: Any) -> tuple[Tensor, Tensor]:
    """An image cut into the patches a Qwen vision tower takes.

    Args:
        pixels: `[channel, height, width]`, normalised; height and width are multiples of patch times merge size.
        vision_config: the model's.

    Returns:
        `[patch, channel * temporal_patch * patch * patch]`, patches of one image token together, and the grid
        `[1, 3]` of time, rows and columns in patches.

    Raises:
        UnsupportedError: height or width do not divide into whole image tokens.
    """
    patch, merge, frames = vision_config.patch_size, vision_config.spatial_merge_size, vision_config.temporal_patch_size
    channels, height, width = pixels.shape
    if height % (patch * merge) or width % (patch * merge):
        raise UnsupportedError(
            f"An image of {height} by {width} pixels does not divide into image tokens of {patch * merge} by "
            f"{patch * merge}; resize it."
        )
    rows, columns = height // patch, width // patch
    cut = pixels.reshape(channels, rows // merge, merge, patch, columns // merge, merge, patch)
    flat = cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, channels, 1, patch * patch)
    whole = flat.expand(-1, -1, frames, -1).reshape(rows * columns, -1)
    return whole, torch.tensor([[1, rows, columns]])


def normalised(subject: Subject, pixels: Tensor) -> Tensor:
    """Pixels from 0 to 1, `[..., channel, height, width]`, as the model's vision tower wants them.

    Raises:
        UnsupportedError: the model has no vision tower.
    """
    if subject.architecture.pixel_scale is None:
        raise UnsupportedError(f"{subject.name} has no vision tower: it reads no images.")
    mean, deviation = (torch.tensor(values)[:, None, None] for values in subject.architecture.pixel_scale)
    return (pixels - mean) / deviation


def encode_image(subject: Subject, pixels: Tensor) -> ImageFeatures:
    """One image through the model's own vision tower.

    Args:
        subject: a vision-language model.
        pixels: `[channel, height, width]`, normalised as the model wants it.

    Raises:
        UnsupportedError: the model has no vision tower, or the size does not divide into image tokens.
    """
    vision_config = getattr(subject.model.config, "vision_config", None)
    if vision_config is None or not hasattr(subject.model, "get_image_features"):
        raise UnsupportedError(f"{subject.name} has no vision tower: it reads no images.")
    flat, grid = patches(pixels, vision_config)
    with torch.no_grad():
        seen = subject.model.get_image_features(
            flat.to(subject.device, subject.dtype), grid.to(subject.device), return_dict=True
        )
    (embeddings,) = seen.pooler_output
    merge = vision_config.spatial_merge_size
    deep = tuple(features[0] for features in getattr(seen, "deepstack_features", None) or ())
    return ImageFeatures(embeddings, (int(grid[0, 1]) // merge, int(grid[0, 2]) // merge), deep)
