"""The change of the residual stream at one position, decomposed by layer, attention or MLP, and source position.

A residual stream is what entered it plus what every layer's attention and MLP added, so the difference between two
prompts is the sum of the differences. In models with norms after attention and MLP (Gemma-2), what is added is their
output after that norm, so it is read there. The sum is checked, not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.components import Components
from kvprobe.errors import NumericsError

# Rounding error allowed between a sum and its parts, relative to the norm of the residual stream.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2


@dataclass(frozen=True, eq=False)
class Parts:
    """What the layers do at one position of one prompt.

    Attributes:
        start: residual stream before the first layer `[hidden]`.
        stream: after each layer `[layer, hidden]`.
        attention: what each layer's attention adds `[layer, hidden]`.
        mlp: what each layer's MLP adds `[layer, hidden]`.
        before_norm: attention before the norm that follows it, if any `[layer, hidden]`.
        pattern: attention weights `[layer, head, key]`, the position itself the last key.
        values: values of the keys `[layer, kv_head, key, head_dim]`.
    """

    start: Tensor
    stream: Tensor
    attention: Tensor
    mlp: Tensor
    before_norm: Tensor
    pattern: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Change:
    """The difference of two prompts' residual streams at one position.

    Attributes:
        stream: after each layer `[layer, hidden]`.
        attention, mlp: what each layer adds to it `[layer, hidden]`.
        last: the layer after which the change is read for all that follows.
        written: what attention and MLP of each layer up to `last` add along the change there `[layer, 2]`.
        sources: what attention adds along it, by source position `[layer, key]`.
        error: largest difference between a whole and the sum of its parts, relative to the residual stream's norm.
    """

    stream: Tensor
    attention: Tensor
    mlp: Tensor
    last: int
    written: Tensor
    sources: Tensor
    error: float


def read_parts(made: Components, layers: int, token_ids: tuple[int, ...], cache: KVCache, position: int) -> Parts:
    """Run the token at `position` on the entries before it and read what every layer adds.

    Args:
        made: components of the model.
        layers: their number.
        token_ids: of the whole prompt.
        cache: of the whole prompt, `position` included.
        position: any but the first.
    """
    names = ("hook_resid_post", "hook_attn_out", "hook_mlp_out", "attn.hook_out", "attn.hook_pattern")
    hooks = {name: [f"blocks.{layer}.{name}" for layer in range(layers)] for name in names}
    wanted = ["blocks.0.hook_resid_pre", *(hook for group in hooks.values() for hook in group)]
    before = cache.take(slice(0, position))
    seen = made.capture(token_ids[position : position + 1], wanted, cache=before).activations
    stream, attention, mlp, before_norm, pattern = (
        torch.stack([seen[hook][0].double() for hook in group]) for group in hooks.values()
    )
    values = torch.stack([layer.values[0, :, : position + 1].double() for layer in cache.layers])
    return Parts(seen["blocks.0.hook_resid_pre"][0].double(), stream, attention, mlp, before_norm, pattern, values)


def change_of(made: Components, base: Parts, donor: Parts, last: int, dtype: torch.dtype) -> Change:
    """The difference `donor - base`, decomposed.

    Args:
        made: components of the model.
        base: parts of one prompt.
        donor: parts of the other at the same position.
        last: the layer after which the change is read.
        dtype: the model's, which sets how exact a sum can be.

    Raises:
        NumericsError: the parts do not add up to the whole.
    """
    stream, attention, mlp = (getattr(donor, name) - getattr(base, name) for name in ("stream", "attention", "mlp"))
    along = stream[last] / stream[last].norm().clamp_min(torch.finfo(torch.float64).tiny)
    written = torch.stack([attention @ along, mlp @ along], dim=-1)[: last + 1]
    sources = (_by_source(made, donor, along) - _by_source(made, base, along))[: last + 1]
    summed = (donor.start - base.start) + (attention + mlp).cumsum(0)
    size = base.stream.norm(dim=-1)
    errors = (
        ((stream - summed).norm(dim=-1) / size).max(),
        ((sources.sum(-1) - written[:, 0]).abs() / size[: last + 1]).max(),
    )
    error = float(torch.stack(errors).max())
    tolerance = _TOLERANCE.get(dtype, _HALF_TOLERANCE)
    if not error <= tolerance:
        raise NumericsError(
            f"The parts of the residual stream miss the whole by {error:.1e} of its norm, more than {tolerance:.0e}: "
            "the model adds something to it that is neither attention nor MLP."
        )
    return Change(stream, attention, mlp, last, written, sources, error)


def _by_source(made: Components, parts: Parts, along: Tensor) -> Tensor:
    """What attention adds along a direction `[hidden]`, by source position `[layer, key]`."""
    found = []
    for layer, (pattern, values) in enumerate(zip(parts.pattern, parts.values, strict=True)):
        raw = parts.before_norm[layer]
        # A norm only scales each channel, so what it made of the sum it makes of every summand.
        scale = torch.where(raw == 0, 0.0, parts.attention[layer] / raw)
        weights = made.output_weights(layer).double().to(along.device)
        by_head = weights @ (scale * along)
        shared = values.repeat_interleave(len(pattern) // len(values), dim=0)
        found.append(torch.einsum("hk,hkd,hd->k", pattern, shared.to(along.device), by_head))
    return torch.stack(found)
