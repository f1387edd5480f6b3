"""Declared changes of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.errors import NoEffectError, UnsupportedError


@dataclass(frozen=True, eq=False)
class KVPatch:
    """Keys and values at `positions` in `layers` come from `donor` instead of the base cache.

    Attributes:
        positions: token positions, the same in both caches; never the decision position.
        donor: a cache of an aligned prompt.
        layers: layer numbers; None for all.
        no_op: declares that the patch may change nothing; an undeclared one raises `NoEffectError`.
    """

    positions: tuple[int, ...]
    donor: KVCache
    layers: tuple[int, ...] | None = None
    no_op: bool = False

    def __post_init__(self) -> None:
        if not self.no_op and (not self.positions or self.layers == ()):
            raise NoEffectError("A KV patch without positions or layers changes nothing; give some, or declare no_op.")


@dataclass(frozen=True)
class AttentionKnockout:
    """The tokens at positions `queries` cannot attend to those at positions `keys` in `layers` (None for all).

    It acts through the additive attention mask alone, so soft-capping and windows stay as they are.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    no_op: bool = False

    def __post_init__(self) -> None:
        if not self.no_op and (not self.queries or not self.keys or self.layers == ()):
            raise NoEffectError(
                "An attention knockout without queries, keys or layers changes nothing; give some, or declare no_op."
            )


Intervention = KVPatch | AttentionKnockout
PatchRow = Intervention | Sequence[Intervention]


def layers_of(intervention: Intervention, count: int) -> tuple[int, ...]:
    """The layer numbers an intervention acts in.

    Raises:
        UnsupportedError: a number is not one of the model's `count` layers.
    """
    if intervention.layers is None:
        return tuple(range(count))
    outside = [layer for layer in intervention.layers if not 0 <= layer < count]
    if outside:
        raise UnsupportedError(f"There is no layer {outside[0]}: the model has layers 0 to {count - 1}.")
    return intervention.layers


def check_patches(base: KVCache, patches: Iterable[KVPatch]) -> None:
    """Refuse patches that do not fit the base or change nothing in it.

    Raises:
        UnsupportedError: a position is missing in the base or the donor, or their shapes differ.
        NoEffectError: donor and base are equal at all patched entries and `no_op` is not declared.
    """
    by_donor: dict[int, list[KVPatch]] = {}
    for patch in patches:
        of_donor = by_donor.setdefault(id(patch.donor), [])
        if not of_donor:
            check_same_shape(base, patch.donor)
        of_donor.append(patch)
    for group in by_donor.values():
        idle = _idle(base, [patch for patch in group if not patch.no_op])
        if idle:
            raise NoEffectError(
                f"Patching positions {_brief(idle[0].positions)} changes nothing: base and donor are equal there; "
                "choose positions from the changed span on, or declare no_op."
            )


def _idle(base: KVCache, patches: Sequence[KVPatch]) -> list[KVPatch]:
    """Patches of one donor that change nothing."""
    idle = list(patches)
    # From the last layer down: what a change reaches at all differs there, and is settled by one comparison.
    for number in reversed(range(len(base.layers))):
        asked = [patch for patch in idle if number in layers_of(patch, len(base.layers))]
        if not asked:
            continue
        donor, places = asked[0].donor, sorted({place for patch in asked for place in patch.positions})
        here, there = base.index_of(places), donor.index_of(places)
        differs = _differ(base.layers[number].take(here), donor.layers[number].take(there))
        changed = {place for place, differ in zip(places, differs.tolist(), strict=True) if differ}
        acting = {id(patch) for patch in asked if not changed.isdisjoint(patch.positions)}
        idle = [patch for patch in idle if id(patch) not in acting]
    return idle


def differing_entries(base: KVCache, donor: KVCache, positions: Tensor) -> Tensor:
    """Bool `[position]` on the CPU: where keys or values differ in any layer.

    Raises:
        UnsupportedError: a position is missing in either.
    """
    here, there = base.index_of(positions), donor.index_of(positions)
    differs = torch.zeros(len(here), dtype=torch.bool)
    # From the last layer down: what a change reaches at all differs there, and is settled by one comparison.
    for mine, other in zip(reversed(base.layers), reversed(donor.layers), strict=True):
        open_ones = (~differs).nonzero()[:, 0]
        if not len(open_ones):
            break
        differs[open_ones] = _differ(mine.take(here[open_ones]), other.take(there[open_ones]))
    return differs


def _differ(mine: LayerKV, other: LayerKV) -> Tensor:
    keys, values = mine.keys != other.keys.to(mine.keys.device), mine.values != other.values.to(mine.values.device)
    return (keys.any(-1) | values.any(-1)).any(1).any(0).cpu()


def check_same_shape(base: KVCache, donor: KVCache) -> None:
    """Raises `UnsupportedError` unless layers, heads, channels and dtype of both caches agree."""
    shapes = [
        [(tuple(layer.keys.shape[1::2]), tuple(layer.values.shape[1::2]), layer.keys.dtype) for layer in cache.layers]
        for cache in (base, donor)
    ]
    if shapes[0] != shapes[1]:
        raise UnsupportedError("Base and donor caches come from different models: layers, heads or dtype differ.")
    if donor.batch not in (1, base.batch):
        raise UnsupportedError(f"A donor of {donor.batch} rows does not fit a base of {base.batch}.")


def _brief(positions: tuple[int, ...]) -> str:
    return str(list(positions)) if len(positions) <= 6 else f"{positions[0]}..{positions[-1]}"
