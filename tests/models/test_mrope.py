"""M-RoPE: rotation by the true difference of two triples, in both layouts, and caches that know their axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_models import tiny, tokens

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import append, concat, overwrite, reposition, slice_cache
from kvprobe.errors import UnsupportedError
from kvprobe.models.architectures.base import architecture_of
from kvprobe.models.rotary import RotaryTable
from kvprobe.models.vision import normalised, patches

FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
families = pytest.mark.parametrize("name", FAMILIES)
LENGTH = 9


def own_rotation(name: str, keys: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    """Unrotated keys put at `axes` with the cosines and sines that the model's own rotary module assembles."""
    subject = tiny(name, torch.float64)
    cos, sin = subject.architecture.decoder(subject.model).rotary_emb(keys, axes[:, None])
    first, second = keys.chunk(2, dim=-1)
    return keys * cos + torch.cat([-second, first], dim=-1) * sin


@families
@given(seed=st.integers(0, 999), reach=st.integers(1, 300))
def test_keys_turn_by_the_difference_of_the_assembled_triples(name: str, seed: int, reach: int) -> None:
    """Any two triples, the three axes moving by different amounts."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 2, 5, 16, dtype=torch.float64, generator=generator)
    source, target = (torch.randint(0, reach + 1, (3, 5), generator=generator) for _ in range(2))
    table = tiny(name).architecture.rotary(tiny(name).model)[0]
    moved = table.rotate(own_rotation(name, keys, source), target - source)
    torch.testing.assert_close(moved, own_rotation(name, keys, target), atol=1e-4, rtol=1e-5)
    still = table.rotate(keys, target - target)
    assert torch.equal(still, keys)


@families
def test_sections_say_how_many_frequencies_each_axis_turns(name: str) -> None:
    subject = tiny(name)
    sections = subject.config.rope_parameters["mrope_section"]
    axes = subject.architecture.rotary(subject.model)[0].frequency_axes
    assert torch.bincount(axes).tolist() == sections
    blocks = bool((axes.diff() >= 0).all())
    assert blocks == name.startswith("qwen2")


@pytest.mark.parametrize(("name", "sections"), [("qwen2_5_vl", [16, 24, 24]), ("qwen3_vl", [24, 20, 20])])
def test_layouts_of_the_released_models(name: str, sections: list[int]) -> None:
    """Against the library's own recomposition of a list of 64 frequencies, each axis marked by its number."""
    subject = tiny(name)
    module = subject.architecture.decoder(subject.model).rotary_emb
    marked = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, 64).clone()
    kept, module.mrope_section = module.mrope_section, sections
    try:
        assembled = module.recomposition_frequencies(marked)
    finally:
        module.mrope_section = kept
    axes = subject.architecture.frequency_axes(sections, 64)
    assert assembled.flatten()[:64].long().tolist() == axes.tolist() == assembled.flatten()[64:].long().tolist()


@families
@pytest.mark.parametrize("offset", [1, 1024, 32_768])
def test_far_moves_stay_within_the_rounding_of_the_models_own_angles(name: str, offset: int) -> None:
    """The model takes angles in float32: at position p they are off by up to p * 2^-24 radians and more."""
    subject = tiny(name, torch.float64)
    here = prefill(subject, tokens(LENGTH)).cache
    native = prefill(subject, tokens(LENGTH), offset=offset).cache.layers[0].keys
    moved = reposition(subject, here, offset)[0].layers[0].keys
    error = float((moved - native).abs().max() / native.norm(dim=-1).max())
    assert error < 2**-22 * (offset + LENGTH)


@families
def test_many_chained_moves_leave_no_more_error_than_one(name: str) -> None:
    subject = tiny(name)
    cache = prefill(subject, tokens(LENGTH)).cache
    axes = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) // 2, torch.arange(LENGTH) % 3])
    cache = KVCache(cache.layers, cache.positions, cache.source_positions, axes, axes)
    chained = cache
    for step in range(64):
        chained, _ = reposition(subject, chained, step % 7 + 1)
    once, _ = reposition(subject, cache, int(chained.positions[0]))
    assert chained.fingerprint() == once.fingerprint()
    assert reposition(subject, once, -int(once.positions[0]))[0].fingerprint() == cache.fingerprint()


@families
def test_text_needs_no_axes(name: str) -> None:
    """Text stands at the same place on all axes, so giving them changes no bit of keys, values or logits."""
    subject, ids = tiny(name), tokens(LENGTH)
    plain, given_axes = prefill(subject, ids), forward(subject, ids, axes=torch.arange(LENGTH).expand(3, -1))
    assert torch.equal(plain.logits, given_axes.logits)
    assert plain.cache.axes is None
    assert plain.cache.fingerprint() != given_axes.cache.fingerprint()
    moved = [reposition(subject, result.cache, 31)[0] for result in (plain, given_axes)]
    assert moved[0].axes is None
    for a, b in zip(moved[0].layers, moved[1].layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


@families
def test_place_and_axes_may_move_by_different_amounts(name: str) -> None:
    subject, ids = tiny(name, torch.float64), tokens(LENGTH)
    cache = prefill(subject, ids).cache
    moved, _ = reposition(subject, cache, 40, 13)
    native = forward(subject, ids, positions=range(40, 49), axes=torch.arange(13, 22).expand(3, -1)).cache
    assert torch.equal(moved.positions, native.positions)
    assert torch.equal(moved.axes, native.axes)
    for mine, other in zip(moved.layers, native.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, atol=2e-5, rtol=2e-5)
    longer, _ = append(subject, moved, [7])
    assert longer.axes[:, -1].tolist() == [22] * 3
    assert longer.positions[-1] == 49
    with pytest.raises(UnsupportedError, match="position -1"):
        reposition(subject, moved, 0, -14)


def test_axes_travel_with_their_entries() -> None:
    subject = tiny("qwen2_5_vl")
    cache = prefill(subject, tokens(LENGTH)).cache
    moved, _ = reposition(subject, cache, 20, 12)
    whole, _ = concat(cache, moved)
    assert whole.axes[0].tolist() == [*range(LENGTH), *range(12, 12 + LENGTH)]
    assert whole.source_axes[2].tolist() == [*range(LENGTH), *range(LENGTH)]
    part, _ = slice_cache(whole, [3, 21])
    assert part.axes.tolist() == [[3, 13]] * 3
    with pytest.raises(UnsupportedError, match="elsewhere on the axes"):
        overwrite(cache, [3], KVCache(cache.layers, cache.positions, cache.positions, moved.axes, moved.source_axes))


def test_axes_that_do_not_fit_are_refused() -> None:
    cache = prefill(tiny("qwen3"), tokens(LENGTH)).cache
    axes = torch.arange(LENGTH).expand(3, -1)
    with pytest.raises(UnsupportedError, match="or neither"):
        KVCache(cache.layers, cache.positions, cache.positions, axes)
    with pytest.raises(UnsupportedError, match="do not fit 9 positions"):
        KVCache(cache.layers, cache.positions, cache.positions, axes[:, :3], axes[:, :3])
    with pytest.raises(UnsupportedError, match="one position only"):
        reposition(tiny("qwen3"), KVCache(cache.layers, cache.positions, cache.positions, axes, axes), 3)
    with pytest.raises(UnsupportedError, match="axis for 3 of 4"):
        RotaryTable(torch.ones(4), frequency_axes=torch.zeros(3, dtype=torch.long))


@families
def test_the_configuration_of_a_subject_is_that_of_its_language_model(name: str) -> None:
    subject = tiny(name)
    assert subject.config.model_type == f"{name}_text"
    assert architecture_of(subject.model.config).auto_class == "AutoModelForImageTextToText"
    assert subject.architecture.window(subject.config) is None


def test_pixels_are_cut_and_normalised_as_the_model_library_does() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    subject, pixels = tiny("qwen2_5_vl"), np.random.default_rng(0).integers(0, 256, (24, 16, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, do_resize=False)
    theirs = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    scaled = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    mine, grid = patches(normalised(subject, scaled), subject.model.config.vision_config)
    torch.testing.assert_close(mine, theirs["pixel_values"], atol=1e-6, rtol=1e-6)
    assert torch.equal(grid, theirs["image_grid_thw"])
    with pytest.raises(UnsupportedError, match="no vision tower"):
        normalised(tiny("qwen3"), scaled)
