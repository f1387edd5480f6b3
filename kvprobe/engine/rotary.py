"""Moving cached keys to other positions by rotating them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import UnsupportedError

MOVABLE = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE scalings whose frequencies do not depend on the length of the sequence."""


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotation of keys in half-split pair layout: channel `i` turns with channel `i + rotary_dim / 2`.

    `inverse_frequencies` `[rotary_dim / 2]`, in radians per position, are those the model itself uses, already
    adjusted by its scaling. Channels from `rotary_dim` on carry no position. A key moves by
    `k(p + delta) = R(delta) k(p)`; the attention scaling of YaRN is in `k(p)` already and must not enter again.
    """

    inverse_frequencies: Tensor
    scaling: str = "default"

    def __post_init__(self) -> None:
        if self.scaling not in MOVABLE:
            raise UnsupportedError(
                f"Cached keys cannot be moved under RoPE scaling {self.scaling!r}: its frequencies depend on the "
                f"sequence length or are unknown to kvprobe (movable: {', '.join(sorted(MOVABLE))})."
            )

    @classmethod
    def from_module(cls, rotary: Any, layer_type: str | None = None) -> RotaryTable:
        """The table of a Hugging Face rotary module; `layer_type` picks one where the module holds several.

        Raises:
            UnsupportedError: dynamic, longrope or unknown scaling, or a module without frequencies.
        """
        scaling = getattr(rotary, "rope_type", None)
        frequencies = getattr(rotary, "inv_freq", None)
        if isinstance(scaling, dict):
            scaling = scaling.get(layer_type)
            frequencies = getattr(rotary, f"{layer_type}_inv_freq", None)
        if not isinstance(scaling, str) or not isinstance(frequencies, Tensor):
            raise UnsupportedError(
                f"Cached keys cannot be moved: {type(rotary).__name__} names no RoPE type or no inverse frequencies "
                f"for layers of type {layer_type!r}."
            )
        # The model rounds its frequencies to float32 at every call, whatever they are stored in.
        return cls(frequencies.detach().float().cpu(), scaling)

    @property
    def rotary_dim(self) -> int:
        """Channels that carry position."""
        return 2 * self.inverse_frequencies.numel()

    def rotate(self, keys: Tensor, delta: Tensor) -> Tensor:
        """Keys moved by `delta` positions.

        Args:
            keys: `[batch, kv_head, position, head_dim]`, post-RoPE, any float dtype.
            delta: integers `[position]`.

        Returns:
            New keys in the dtype of `keys`, computed in float32 (float64 for float64 keys); entries with delta 0
            are bit-equal.
        """
        if self.rotary_dim > keys.shape[-1]:
            raise UnsupportedError(
                f"The RoPE table turns {self.rotary_dim} channels but keys have only {keys.shape[-1]}."
            )
        precision = torch.promote_types(keys.dtype, torch.float32)
        angles = delta.cpu().double()[:, None] * self.inverse_frequencies.double()[None, :]
        cos = angles.cos().to(keys.device, precision)
        sin = angles.sin().to(keys.device, precision)
        half = self.rotary_dim // 2
        first = keys[..., :half].to(precision)
        second = keys[..., half : 2 * half].to(precision)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(keys.dtype)
        moved = torch.cat([turned, keys[..., 2 * half :]], dim=-1)
        still = (delta == 0).to(keys.device)[:, None]
        return torch.where(still, keys, moved)
