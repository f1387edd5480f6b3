"""Moving cached keys to other positions by rotating them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import UnsupportedError

MOVABLE = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE scalings whose frequencies do not depend on the length of the sequence."""
# Channels turned at once: few enough to stay in a processor's cache from the first of three products to the last.
_BLOCK = 2**17


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotation of keys: channel `i` turns with channel `i + rotary_dim / 2`, or `2i` with `2i + 1` if `adjacent`.

    `inverse_frequencies` `[rotary_dim / 2]`, in radians per position, are those the model itself uses, already
    adjusted by its scaling. Channels from `rotary_dim` on carry no position. A key moves by
    `k(p + delta) = R(delta) k(p)`; the attention scaling of YaRN is in `k(p)` already and must not enter again.

    Under M-RoPE `frequency_axes` `[rotary_dim / 2]` says by which axis of a position each frequency turns: 0 temporal,
    1 height, 2 width. None: there is one position only.
    """

    inverse_frequencies: Tensor
    scaling: str = "default"
    adjacent: bool = False
    frequency_axes: Tensor | None = None

    def __post_init__(self) -> None:
        if self.frequency_axes is not None and self.frequency_axes.shape != self.inverse_frequencies.shape:
            raise UnsupportedError(
                f"M-RoPE names an axis for {self.frequency_axes.numel()} of {self.inverse_frequencies.numel()} "
                "frequencies; its sections must add up to half of the channels that turn."
            )
        if self.scaling not in MOVABLE:
            raise UnsupportedError(
                f"Cached keys cannot be moved under RoPE scaling {self.scaling!r}: its frequencies depend on the "
                f"sequence length or are unknown to kvprobe (movable: {', '.join(sorted(MOVABLE))})."
            )

    @classmethod
    def from_module(cls, rotary: Any, layer_type: str | None = None, *, adjacent: bool = False) -> RotaryTable:
        """The table of a Hugging Face rotary module; `layer_type` picks one where the module holds several.

        `adjacent` says how the model lays out pairs, which the module does not know.

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
        return cls(frequencies.detach().float().cpu(), scaling, adjacent)

    @property
    def rotary_dim(self) -> int:
        """Channels that carry position."""
        return 2 * self.inverse_frequencies.numel()

    def rotate(self, keys: Tensor, delta: Tensor) -> Tensor:
        """Keys moved by `delta` positions.

        Args:
            keys: `[batch, kv_head, position, head_dim]`, post-RoPE, any float dtype.
            delta: integers `[position]`, or `[3, position]` by axis under M-RoPE.

        Returns:
            New keys in the dtype of `keys`, computed in float32 (float64 for float64 keys); entries with delta 0
            are bit-equal.

        Raises:
            UnsupportedError: the keys have too few channels, or there are axes and the model has one position only.
        """
        return self.turned(keys, self.rotation(delta, keys))

    def rotation(self, delta: Tensor, keys: Tensor) -> Rotation:
        """The rotation by `delta` for `keys` and any others like them, such as another layer's; see `rotate`.

        Args:
            delta: as for `rotate`.
            keys: of which dtype and device are used.
        """
        precision = torch.promote_types(keys.dtype, torch.float32)
        delta = delta.cpu()
        # What moves as a whole, as a chunk does, needs the angles of one position only.
        turns = delta[..., :1] if bool((delta == delta[..., :1]).all()) else delta
        angles = self._turns(turns.double()) * self.inverse_frequencies.double()[None, :]
        still = (turns if turns.ndim == 1 else turns.abs().amax(0)) == 0
        cos = angles.cos()
        return Rotation(
            (cos.repeat_interleave(2, -1) if self.adjacent else cos.repeat(1, 2)).to(keys.device, precision),
            angles.sin().to(keys.device, precision),
            still.to(keys.device)[:, None] if bool(still.any()) else None,
        )

    def turned(self, keys: Tensor, rotation: Rotation) -> Tensor:
        """Keys moved by a rotation; see `rotate`."""
        if self.rotary_dim > keys.shape[-1]:
            raise UnsupportedError(
                f"The RoPE table turns {self.rotary_dim} channels but keys have only {keys.shape[-1]}."
            )
        moved = torch.empty_like(keys)
        step = max(1, _BLOCK // max(1, keys[..., :1, :].numel()))
        for start in range(0, keys.shape[-2], step):
            place = slice(start, start + step)
            self._turn(keys[..., place, :], rotation.at(place), moved[..., place, :])
        return moved if rotation.still is None else torch.where(rotation.still, keys, moved)

    def _turn(self, keys: Tensor, rotation: Rotation, moved: Tensor) -> None:
        """Write the keys, turned, into `moved`."""
        width, sin = self.rotary_dim, rotation.sin
        source = keys[..., :width].to(sin.dtype)
        turned = moved[..., :width] if moved.dtype == sin.dtype else torch.empty_like(source)
        # The two channels of each pair lie along axis -1 or -2.
        axis, shape = (-1, (-1, 2)) if self.adjacent else (-2, (2, -1))
        first, second = source.unflatten(-1, shape).unbind(axis)
        to_first, to_second = turned.unflatten(-1, shape).unbind(axis)
        torch.mul(source, rotation.cos, out=turned)
        to_first.addcmul_(second, sin, value=-1)
        to_second.addcmul_(first, sin)
        if moved.dtype != sin.dtype:
            moved[..., :width] = turned
        if width < keys.shape[-1]:
            moved[..., width:] = keys[..., width:]

    def _turns(self, delta: Tensor) -> Tensor:
        """By how many positions each frequency turns: `[position, 1]`, or `[position, rotary_dim / 2]` by axis."""
        if delta.ndim == 1:
            return delta[:, None]
        if self.frequency_axes is None:
            raise UnsupportedError("These keys were to move along three axes, and the model has one position only.")
        return delta[self.frequency_axes].T


@dataclass(frozen=True, eq=False)
class Rotation:
    """One move: `cos` `[position or 1, rotary_dim]` for every channel, `sin` `[position or 1, rotary_dim / 2]` by pair.

    `still` bool `[position or 1, 1]` marks entries that do not move; None where there are none.
    """

    cos: Tensor
    sin: Tensor
    still: Tensor | None

    def at(self, place: slice) -> Rotation:
        """The part for the positions in `place`."""
        if len(self.cos) == 1:
            return self
        return Rotation(self.cos[place], self.sin[place], None if self.still is None else self.still[place])
