"""TransformerLens' bridge over a subject's weights, and the names of its activations."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import UnsupportedError

# Where the position axis is in each activation, the batch axis being 0.
_OF_BLOCK = {
    "hook_resid_pre": 1,
    "hook_resid_mid": 1,
    "hook_resid_post": 1,
    "hook_attn_out": 1,
    "hook_mlp_out": 1,
    "attn.hook_q": 1,
    "attn.hook_k": 1,
    "attn.hook_v": 1,
    "attn.hook_z": 1,
    "attn.hook_rot_q": 2,
    "attn.hook_rot_k": 2,
    "attn.hook_attn_scores": 2,
    "attn.hook_pattern": 2,
    "attn.hook_out": 1,
    "mlp.hook_pre": 1,
    "mlp.hook_post": 1,
}
_OF_MODEL = {"hook_embed": 1, "ln_final.hook_scale": 1, "ln_final.hook_normalized": 1}
HOOK_LEVEL = 1
"""Tags the hooks that the engine adds, so that only they are removed."""


def bridge_of(model: Any, name: str) -> Any:
    """A TransformerLens bridge over a copy of the module tree that holds the model's own parameters and buffers.

    Raises:
        UnsupportedError: TransformerLens does not bridge the architecture.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    weights = itertools.chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in weights})
    try:
        bridge = build_bridge_from_module(twin, type(model).__name__, hf_config=twin.config, model_name=name)
    except (ImportError, ValueError) as error:
        raise UnsupportedError(f"TransformerLens does not bridge {type(model).__name__}: {error}") from error
    # It adds a bias of zeros to the unembedding, which would ask for a gradient.
    twin.requires_grad_(False)
    return bridge


def hook_points(bridge: Any, layers: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The hook points that a forward pass visits, and the position axis of each, by name."""
    axes = dict(_OF_MODEL)
    for layer in range(layers):
        axes |= {f"blocks.{layer}.{name}": axis for name, axis in _OF_BLOCK.items()}
    everything = bridge.hook_dict
    points = {name: everything[name] for name in axes if name in everything}
    visited: dict[str, tuple[int, ...]] = {}

    def visit(name: str) -> Callable[..., None]:
        def read(activation: Tensor, *, hook: Any) -> None:  # noqa: ARG001
            visited[name] = tuple(activation.shape)

        return read

    try:
        for name, point in points.items():
            point.add_hook(visit(name), level=HOOK_LEVEL)
        with torch.no_grad():
            bridge.original_model(torch.ones((1, 2), dtype=torch.long, device=bridge.original_model.device))
    finally:
        for point in points.values():
            point.remove_hooks(level=HOOK_LEVEL)
    points = {name: point for name, point in points.items() if name in visited}
    return points, {name: axes[name] for name in points}
