"""Prompts of the task `picture_question` with the pictures themselves where the text describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvprobe.engine.visual import Piece
from kvprobe.errors import UnsupportedError
from kvprobe.models.vision import encode_image, normalised
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.picture_question import IMAGE, OTHER
from kvprobe.tasks.pictures import Picture, draw

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def drawn_parts(subject: Subject, context: TokenizedContext, seed: int, side: int) -> dict[str, Piece]:
    """The segments of a prompt, each described picture drawn and seen by the model's vision tower.

    Args:
        subject: a vision-language model.
        context: a prompt of the task.
        seed: of what varies in a drawing; the two prompts of a pair are to share it.
        side: rows, and columns, of image tokens of a picture.

    Raises:
        UnsupportedError: the model reads no images, or the prompt describes none.
    """
    vision_config = getattr(subject.model.config, "vision_config", None)
    if vision_config is None:
        raise UnsupportedError(f"{subject.name} has no vision tower: it reads no images.")
    if IMAGE not in context.spans:
        raise UnsupportedError(f"The prompt has no segment {IMAGE!r}; use the task picture_question.")
    size = side * vision_config.patch_size * vision_config.spatial_merge_size
    parts: dict[str, Piece] = {}
    first = min(span.start for span in context.spans.values())
    if first:
        parts["bos"] = context.token_ids[:first]
    for name, span in context.spans.items():
        ids = context.token_ids[span.start : span.end]
        if name in (IMAGE, OTHER):
            rng = np.random.default_rng([seed, name == OTHER])
            pixels = torch.from_numpy(draw(Picture.of(subject.tokenizer.decode(ids)), size, rng))
            parts[name] = encode_image(subject, normalised(subject, pixels))
        else:
            parts[name] = ids
    return parts
