"""Prompts of text and images whose token spans and three-axis positions are exact by construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.engine.forward import Forward, forward
from kvprobe.errors import ConfigError
from kvprobe.models.images import ImageFeatures
from kvprobe.models.subject import Subject
from kvprobe.tasks.context import Span

Piece = Sequence[int] | ImageFeatures
"""Token ids of text, or an image."""
Part = tuple[str, Piece]
"""A named segment."""


@dataclass(frozen=True, eq=False)
class VisualPrompt:
    """A prompt in which image features stand for image tokens.

    Attributes:
        token_ids: with one image token for each vector of an image.
        axes: int64 `[3, token]`: temporal, height and width position of each token.
        spans: token range of each segment; an image's is that of its image tokens, without the tokens that open and
            close it.
        images: by segment, in the order of the prompt.
        start: position of the first token, on all axes.
    """

    token_ids: tuple[int, ...]
    axes: Tensor
    spans: dict[str, Span]
    images: dict[str, ImageFeatures]
    start: int = 0

    @property
    def positions(self) -> range:
        """Place of each token; `axes` run behind it after an image."""
        return range(self.start, self.start + len(self.token_ids))


def visual_prompt(subject: Subject, parts: Sequence[Part], start: int = 0) -> VisualPrompt:
    """A prompt of named segments from position `start` on; each image between the model's opening and closing tokens.

    Text stands at equal places on all axes. An image begins where text would and holds all its rows and columns; what
    follows goes on after its largest axis.

    Raises:
        ConfigError: two segments share a name, or there is none.
    """
    config = subject.model.config
    names = [name for name, _ in parts]
    if not parts or len(set(names)) < len(names):
        raise ConfigError(f"A prompt needs segments of different names, not {names}.")
    ids: list[int] = []
    places: list[Tensor] = []
    spans: dict[str, Span] = {}
    images: dict[str, ImageFeatures] = {}
    first = start
    for name, part in parts:
        if isinstance(part, ImageFeatures):
            middle, axes = [config.image_token_id] * len(part), part.axes(start + 1)
            end = int(axes.max()) + 1
            piece = [config.vision_start_token_id, *middle, config.vision_end_token_id]
            places += [_text_axes(start, 1), axes, _text_axes(end, 1)]
            spans[name] = Span(len(ids) + 1, len(ids) + 1 + len(part))
            images[name] = part
            start = end + 1
        else:
            piece = list(part)
            places.append(_text_axes(start, len(piece)))
            spans[name] = Span(len(ids), len(ids) + len(piece))
            start += len(piece)
        ids += piece
    return VisualPrompt(tuple(ids), torch.cat(places, dim=1), spans, images, first)


def prefill_visual(subject: Subject, prompt: VisualPrompt) -> Forward:
    """One causal pass over text and images.

    Raises:
        NumericsError: the logits are not finite.
        UnsupportedError: the model reads no images.
    """
    images = tuple(prompt.images.values())
    return forward(subject, prompt.token_ids, positions=prompt.positions, axes=prompt.axes, images=images)


def _text_axes(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).expand(3, -1)
