"""Thirds of a model's depth, and other bands of layers."""

from __future__ import annotations

THIRDS = ("early", "mid", "late")


def third_of(layer: int, count: int) -> str:
    """`early`, `mid` or `late`: the third of the depth that `layer` of `count` lies in."""
    return THIRDS[3 * layer // count]


def layer_thirds(count: int) -> dict[str, tuple[int, ...]]:
    """The layers of each third as `early_layers`, `mid_layers`, `late_layers`; a third without layers is left out."""
    thirds = {
        f"{third}_layers": tuple(layer for layer in range(count) if third_of(layer, count) == third) for third in THIRDS
    }
    return {name: layers for name, layers in thirds.items() if layers}


def layer_bands(count: int) -> dict[str, tuple[int, ...]]:
    """Thirds of the depth, and all layers up to and from each, by name."""
    layers = tuple(range(count))
    up_to = {f"up_to_layer_{layer}": layers[: layer + 1] for layer in layers}
    on = {f"from_layer_{layer}": layers[layer:] for layer in layers}
    return {**layer_thirds(count), **up_to, **on}
