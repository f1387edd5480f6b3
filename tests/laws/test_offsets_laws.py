"""Moved keys against native ones at offsets up to 32768, for every RoPE type, at every layer.

The model library rounds the angle `position * frequency` to float32, an error that grows with the position. Two laws
separate it from ours: with exact angles a moved cache is the native one, and the library's rounding is all that is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import CONFIGS, FAMILIES, rounds_to_float32, tiny, tokens

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import prefill
from kvprobe.engine.operations import reposition
from kvprobe.models.rotary import RotaryTable
from kvprobe.models.subject import Subject

FURTHEST = 32768
LENGTH = 9
OFFSETS = st.integers(0, FURTHEST)
# Models with three position axes have laws of their own.
TEXT = tuple(name for name in FAMILIES if not hasattr(CONFIGS[name], "vision_config"))
UNIT = 2.0**-24
"""Largest relative error of rounding to float32."""


def angles(rotary: Any, position_ids: torch.Tensor, layer_type: str | None) -> tuple[torch.Tensor, float]:
    own = layer_type if isinstance(rotary.rope_type, dict) else None
    frequencies = getattr(rotary, f"{own}_inv_freq") if own else rotary.inv_freq
    scaling = getattr(rotary, f"{own}_attention_scaling") if own else rotary.attention_scaling
    # The model rounds its frequencies to float32 too; those are the ones meant.
    return position_ids[..., None].double() * frequencies.float().double(), scaling


@contextmanager
def exact_angles(subject: Subject) -> Iterator[None]:
    """Inside the block the model's angles are float64: none of the rounding that grows with the position is left."""
    rotary = subject.architecture.decoder(subject.model).rotary_emb

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        turn, scaling = angles(rotary, position_ids, layer_type)
        if subject.config.model_type == "deepseek_v2":
            return torch.polar(torch.full_like(turn, scaling), turn)
        turn = torch.cat([turn, turn], dim=-1)
        return turn.cos() * scaling, turn.sin() * scaling

    original = rotary.forward
    rotary.forward = forward
    try:
        yield
    finally:
        rotary.forward = original


def exact(subject: Subject, offset: int) -> KVCache:
    with exact_angles(subject):
        return prefill(subject, tokens(LENGTH), offset=offset).cache


def distances(a: KVCache, b: KVCache) -> list[tuple[float, float]]:
    """For each layer the Frobenius distance of keys and of values, both unchanged by any rotation."""
    return [
        (float((x.keys - y.keys).norm()), float((x.values - y.values).norm()))
        for x, y in zip(a.layers, b.layers, strict=True)
    ]


@pytest.mark.parametrize("name", TEXT)
@given(start=OFFSETS, target=OFFSETS)
@example(start=0, target=FURTHEST)
@example(start=FURTHEST, target=0)
def test_with_exact_angles_a_moved_cache_is_the_native_one(name: str, start: int, target: int) -> None:
    subject = tiny(name, torch.float64)
    moved, _ = reposition(subject, exact(subject, start), target - start)
    native = exact(subject, target)
    limit = 2e-5 if rounds_to_float32(name) else 1e-9
    assert max(max(pair) for pair in distances(moved, native)) < limit


@pytest.mark.parametrize("name", TEXT)
@given(target=OFFSETS)
@example(target=FURTHEST)
def test_whole_caches_differ_by_the_rounding_of_the_model_librarys_angles_alone(name: str, target: int) -> None:
    """The triangle inequality, moved - native <= (moved - exact) + (exact - native), at every layer."""
    subject = tiny(name, torch.float64)
    here, there = (prefill(subject, tokens(LENGTH), offset=offset).cache for offset in (0, target))
    moved, _ = reposition(subject, here, target)
    limit = 4e-5 if rounds_to_float32(name) else 1e-9
    rounding = zip(distances(here, exact(subject, 0)), distances(there, exact(subject, target)), strict=True)
    for got, (at_start, at_target) in zip(distances(moved, there), rounding, strict=True):
        for part in (0, 1):
            assert got[part] <= at_start[part] + at_target[part] + limit


def pair_norms(table: RotaryTable, keys: torch.Tensor) -> torch.Tensor:
    """`[..., rotary_dim]`: for each rotated channel the length of its pair."""
    shape, axis = ((-1, 2), -1) if table.adjacent else ((2, -1), -2)
    pairs = keys[..., : table.rotary_dim].double().unflatten(-1, shape)
    return pairs.norm(dim=axis, keepdim=True).expand_as(pairs).flatten(-2)


def per_channel(table: RotaryTable) -> torch.Tensor:
    """`[rotary_dim]`: the frequency each channel turns with."""
    frequencies = table.inverse_frequencies.double()
    return frequencies.repeat_interleave(2) if table.adjacent else frequencies.repeat(2)


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(start=OFFSETS, target=OFFSETS)
@example(start=0, target=FURTHEST)
def test_first_layer_keys_are_native_within_float32_rounding(
    name: str, dtype: torch.dtype, start: int, target: int
) -> None:
    """An angle rounded to float32 is off by at most UNIT of itself, and turns its pair by no more than that."""
    subject = tiny(name, dtype)
    table = subject.architecture.rotary(subject.model)[0]
    here, there = (prefill(subject, tokens(LENGTH), offset=offset).cache for offset in (start, target))
    moved, _ = reposition(subject, here, target - start)
    mine, native = moved.layers[0].keys.double(), there.layers[0].keys.double()
    turns = (here.positions + there.positions).double()[:, None] * per_channel(table)
    # Besides the two angles: cosines, sines, products, sums and the norm before them, each rounded a few times.
    allowed = pair_norms(table, native) * UNIT * (turns + 24)
    assert bool(((mine - native)[..., : table.rotary_dim].abs() <= allowed).all())
    rest = torch.finfo(dtype).eps * 8 * native.abs().max()
    assert bool(((mine - native)[..., table.rotary_dim :].abs() <= rest).all())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixty_four_chained_moves_leave_no_more_error_than_one(name: str, dtype: torch.dtype) -> None:
    subject = tiny(name, dtype)
    cache = prefill(subject, tokens(LENGTH)).cache
    generator = torch.Generator().manual_seed(3)
    chained = cache
    for place in [*torch.randint(0, FURTHEST, (63,), generator=generator).tolist(), 20011]:
        chained, _ = reposition(subject, chained, place - int(chained.positions[0]))
    once, _ = reposition(subject, cache, 20011)
    assert chained.fingerprint() == once.fingerprint()
