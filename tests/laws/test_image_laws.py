"""Image KV: equal to the model library's own forward, exact at its own place, rotated along all axes when moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny, tokens

from kvprobe.composing.images import entries_of, prefill_around
from kvprobe.edit.base import CachedPrompt
from kvprobe.edit.hugging_face import model_inputs
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.generation import generate
from kvprobe.engine.operations import overwrite, recompute, reposition, splice
from kvprobe.engine.visual import VisualPrompt, prefill_visual, visual_prompt
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.models.images import ImageFeatures
from kvprobe.models.vision import encode_image, patches

FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
EXACT = 1e-12
families = pytest.mark.parametrize("name", FAMILIES)


def picture(seed: int, rows: int = 3, columns: int = 2) -> torch.Tensor:
    """Random pixels of so many image tokens."""
    return torch.randn(3, 8 * rows, 8 * columns, generator=torch.Generator().manual_seed(seed))


def seen(name: str, seed: int, rows: int = 3, columns: int = 2) -> ImageFeatures:
    return encode_image(tiny(name, torch.float64), picture(seed, rows, columns))


def one_image(name: str, before: int = 5, image: int = 0, after: int = 4, seed: int = 0) -> VisualPrompt:
    parts = [("before", tokens(before, seed)), ("image", seen(name, image)), ("after", tokens(after, 9))]
    return visual_prompt(tiny(name, torch.float64), [part for part in parts if len(part[1])])


def plain_logits(name: str, ids: tuple[int, ...], pictures: list[torch.Tensor]) -> torch.Tensor:
    """The model library's own forward from pixels, with positions of its own making."""
    model = tiny(name, torch.float64).model
    flat, grids = zip(*(patches(pixels.double(), model.config.vision_config) for pixels in pictures), strict=True)
    token_ids = torch.tensor([ids])
    with torch.no_grad():
        output = model(
            input_ids=token_ids,
            pixel_values=torch.cat(flat),
            image_grid_thw=torch.cat(grids),
            mm_token_type_ids=(token_ids == model.config.image_token_id).int(),
            use_cache=False,
        )
    return output.logits[0, -1]


@families
@given(before=st.integers(1, 9), rows=st.integers(1, 4), columns=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_prefill_with_images_equals_a_plain_hugging_face_forward(
    name: str, before: int, rows: int, columns: int, seed: int
) -> None:
    subject = tiny(name, torch.float64)
    parts = [
        ("before", tokens(before, seed)),
        ("first", seen(name, seed, rows, columns)),
        ("between", tokens(3, seed + 1)),
        ("second", seen(name, seed + 2, 2, 3)),
        ("after", tokens(4, seed + 3)),
    ]
    prompt = visual_prompt(subject, parts)
    ours = prefill_visual(subject, prompt)
    plain = plain_logits(name, prompt.token_ids, [picture(seed, rows, columns), picture(seed + 2, 2, 3)])
    torch.testing.assert_close(ours.logits, plain, atol=EXACT, rtol=EXACT)
    assert torch.equal(ours.cache.axes, prompt.axes)


@families
def test_positions_are_those_the_model_library_makes(name: str) -> None:
    subject = tiny(name, torch.float64)
    prompt = visual_prompt(
        subject,
        [("a", tokens(5)), ("x", seen(name, 1, 4, 2)), ("y", seen(name, 2, 1, 3)), ("b", tokens(3))],
    )
    ids = torch.tensor([prompt.token_ids])
    theirs, _ = subject.model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == subject.model.config.image_token_id).int(),
        image_grid_thw=torch.tensor([[1, 8, 4], [1, 2, 6]]),
    )
    assert torch.equal(theirs[:, 0], prompt.axes)


@families
def test_decoding_after_an_image_goes_on_from_the_largest_axis(name: str) -> None:
    subject, prompt = tiny(name, torch.float64), one_image(name)
    result = prefill_visual(subject, prompt)
    assert int(result.cache.axes.max()) + 1 < len(prompt.token_ids)
    next_token = int(result.logits.argmax())
    step = forward(subject, [next_token], result.cache)
    assert step.cache.axes[:, -1].tolist() == [int(prompt.axes.max()) + 1] * 3
    longer = (*prompt.token_ids, next_token)
    torch.testing.assert_close(step.logits, plain_logits(name, longer, [picture(0)]), atol=EXACT, rtol=EXACT)
    answer = generate(subject, prompt.token_ids, result.cache, [()], limit=3, ends=())[0]
    assert answer.token_ids[:2] == (next_token, int(step.logits.argmax()))
    assert torch.equal(answer.cache.axes[:, : len(prompt.token_ids)], prompt.axes)
    again = forward(subject, answer.token_ids[-2:-1], step.cache)
    assert answer.token_ids[2] == int(again.logits.argmax())
    # An exported cache carries its positions, whatever an unrelated call has left in the model.
    subject.model.model.rope_deltas = torch.tensor([[-1]])
    handed = CachedPrompt(prompt.token_ids, {}, result.cache.take(slice(0, -1)))
    theirs = subject.model.generate(**model_inputs(subject, handed), max_new_tokens=3, do_sample=False, eos_token_id=-1)
    assert tuple(theirs[0, len(prompt.token_ids) :].tolist()) == answer.token_ids


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_image_spliced_at_its_own_place_is_exact(name: str, dtype: torch.dtype) -> None:
    """The law that critique MU1 asks for: anything below agreement 1.0 is a fault, not a property of images."""
    subject = tiny(name, dtype)
    parts = [("before", tokens(6)), ("image", encode_image(subject, picture(0))), ("after", tokens(5, 2))]
    prompt = visual_prompt(subject, parts)
    full = prefill_visual(subject, prompt)
    spliced = prefill_around(subject, prompt, {"image": entries_of(full.cache, prompt, "image")})
    error = float((spliced.logits - full.logits).abs().max())
    assert error <= (1e-12 if dtype == torch.float64 else 1e-4)
    assert torch.equal(spliced.cache.axes, full.cache.axes)
    assert torch.equal(
        entries_of(spliced.cache, prompt, "image").layers[-1].keys,
        entries_of(full.cache, prompt, "image").layers[-1].keys,
    )
    assert spliced.receipt.tokens_appended == len(prompt.token_ids) - 6
    assert (spliced.receipt.tokens_reused, spliced.receipt.tokens_rotated) == (6, 0)


@families
@given(shift=st.integers(1, 200), seed=st.integers(0, 99))
def test_a_moved_image_has_the_first_layer_keys_of_a_native_prefill(name: str, shift: int, seed: int) -> None:
    """Layer 0 knows the token and its position only, so other text before it changes nothing there."""
    subject = tiny(name, torch.float64)
    short, long = one_image(name, before=2), one_image(name, before=2 + shift, seed=seed)
    native = entries_of(prefill_visual(subject, long).cache, long, "image")
    moved = entries_of(
        prefill_around(
            subject, long, {"image": entries_of(prefill_visual(subject, short).cache, short, "image")}
        ).cache,
        long,
        "image",
    )
    assert torch.equal(moved.axes, native.axes)
    assert torch.equal(moved.axes - moved.source_axes, torch.full((3, len(native)), shift))
    torch.testing.assert_close(moved.layers[0].keys, native.layers[0].keys, atol=2e-5, rtol=2e-5)
    assert torch.equal(moved.layers[0].values, native.layers[0].values)
    assert not torch.equal(moved.layers[1].values, native.layers[1].values)


@families
@given(delta=st.integers(1, 200))
def test_a_prompt_with_an_image_moves_as_a_whole(name: str, delta: int) -> None:
    subject, prompt = tiny(name, torch.float64), one_image(name)
    here = prefill_visual(subject, prompt).cache
    there = forward(
        subject,
        prompt.token_ids,
        positions=range(delta, delta + len(prompt.token_ids)),
        axes=prompt.axes + delta,
        images=list(prompt.images.values()),
    ).cache
    moved, _ = reposition(subject, here, delta)
    # The model takes its angles in float32, whatever its dtype, so later layers differ by that rounding.
    for mine, native in zip(moved.layers, there.layers, strict=True):
        torch.testing.assert_close(mine.keys, native.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, native.values, atol=1e-4, rtol=1e-4)
    assert torch.equal(moved.layers[0].values, there.layers[0].values)
    twice = reposition(subject, reposition(subject, here, 2 * delta)[0], -delta)[0]
    assert twice.fingerprint() == moved.fingerprint()
    assert reposition(subject, twice, -delta)[0].fingerprint() == here.fingerprint()


@families
def test_only_the_temporal_axis_is_not_enough(name: str) -> None:
    """The paper says that only the temporal axis moves; after text all three do, by the same amount."""
    subject = tiny(name, torch.float64)
    short, long = one_image(name, before=2), one_image(name, before=39)
    source = entries_of(prefill_visual(subject, short).cache, short, "image")
    native = entries_of(prefill_visual(subject, long).cache, long, "image")
    difference = long.axes[:, long.spans["image"].positions] - short.axes[:, short.spans["image"].positions]
    assert difference.tolist() == [[37] * len(source)] * 3
    table = subject.architecture.rotary(subject.model)[0]
    temporal = difference * torch.tensor([[1], [0], [0]])
    keys, wanted = source.layers[0].keys, native.layers[0].keys
    torch.testing.assert_close(table.rotate(keys, difference), wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(table.rotate(keys, difference[0]), wanted, atol=2e-5, rtol=2e-5)
    wrong = table.rotate(keys, temporal)
    error = (wrong - wanted).norm() / wanted.norm()
    unmoved = (keys - wanted).norm() / wanted.norm()
    assert error > 0.3
    assert unmoved > 0.3
    half = table.rotary_dim // 2
    for axis in range(3):
        channels = [i for n in range(half) if int(table.frequency_axes[n]) == axis for i in (n, n + half)]
        away = float((wrong - wanted)[..., channels].abs().max())
        assert (away < 2e-5) == (axis == 0)


@families
def test_several_resident_images_keep_their_own_axes(name: str) -> None:
    subject = tiny(name, torch.float64)
    parts = [
        ("before", tokens(4)),
        ("first", seen(name, 1, 4, 2)),
        ("between", tokens(3, 1)),
        ("second", seen(name, 2, 2, 2)),
        ("after", tokens(3, 2)),
    ]
    prompt = visual_prompt(subject, parts)
    full = prefill_visual(subject, prompt)
    resident = {key: entries_of(full.cache, prompt, key) for key in ("second", "first")}
    both = prefill_around(subject, prompt, resident)
    torch.testing.assert_close(both.logits, full.logits, atol=EXACT, rtol=EXACT)
    alone = {}
    for key, image in prompt.images.items():
        short = visual_prompt(subject, [("open", tokens(1)), (key, image)])
        alone[key] = entries_of(prefill_visual(subject, short).cache, short, key)
    moved = prefill_around(subject, prompt, alone)
    assert torch.equal(moved.cache.axes, prompt.axes)
    torch.testing.assert_close(moved.cache.layers[0].keys, full.cache.layers[0].keys, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(moved.logits, full.logits, atol=1e-6)


@families
def test_an_image_swapped_inside_a_prompt(name: str) -> None:
    """A field-only edit of an image: its own entries are the new ones, everything after it is stale."""
    subject = tiny(name, torch.float64)
    old, new = one_image(name, image=0), one_image(name, image=1)
    stale, oracle = prefill_visual(subject, old), prefill_visual(subject, new)
    span = new.spans["image"]
    copied, _ = overwrite(stale.cache, span, oracle.cache)
    fresh, receipt = recompute(subject, stale.cache, new.token_ids, span, images=list(new.images.values()))
    assert receipt.tokens_recomputed == len(span)
    for mine, other in zip(fresh.layers, copied.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, atol=EXACT, rtol=EXACT)
        torch.testing.assert_close(mine.values, other.values, atol=EXACT, rtol=EXACT)
    downstream = range(span.start, len(new.token_ids))
    everything, _ = overwrite(stale.cache, downstream, oracle.cache)
    assert everything.fingerprint() == oracle.cache.fingerprint()
    resident = prefill_around(subject, new, {"image": entries_of(oracle.cache, new, "image")})
    torch.testing.assert_close(resident.logits, oracle.logits, atol=EXACT, rtol=EXACT)


@families
def test_splicing_an_image_moves_what_follows_by_its_extent_on_the_axes(name: str) -> None:
    subject = tiny(name, torch.float64)
    text, prompt = tokens(8), one_image(name, before=3, after=0)
    chunk = prefill_visual(subject, prompt).cache.take(slice(3, None))
    whole, _ = splice(subject, prefill(subject, text).cache, chunk, 5)
    wanted = visual_prompt(subject, [("a", text[:5]), ("image", prompt.images["image"]), ("b", text[5:])])
    assert torch.equal(whole.axes, wanted.axes)
    assert whole.positions.tolist() == list(range(len(wanted.token_ids)))
    native = prefill_visual(subject, wanted).cache
    torch.testing.assert_close(whole.layers[0].keys, native.layers[0].keys, atol=2e-5, rtol=2e-5)


def test_image_features_must_fit_the_image_tokens() -> None:
    subject, prompt = tiny("qwen2_5_vl", torch.float64), one_image("qwen2_5_vl")
    with pytest.raises(UnsupportedError, match="6 image tokens to run and 0 image features"):
        forward(subject, prompt.token_ids)
    with pytest.raises(UnsupportedError, match="needs 6 image tokens"):
        ImageFeatures(torch.zeros(5, 8), (3, 2))
    with pytest.raises(UnsupportedError, match="9 by 8 pixels"):
        encode_image(subject, torch.zeros(3, 9, 8))
    with pytest.raises(UnsupportedError, match="reads no images"):
        encode_image(tiny("qwen3"), picture(0))
    with pytest.raises(UnsupportedError, match="a model of text"):
        forward(tiny("qwen3"), tokens(6), images=list(prompt.images.values()))


def test_prompts_and_resident_entries_are_checked() -> None:
    subject, prompt = tiny("qwen2_5_vl", torch.float64), one_image("qwen2_5_vl")
    cache = prefill_visual(subject, prompt).cache
    image = entries_of(cache, prompt, "image")
    with pytest.raises(ConfigError, match="different names"):
        visual_prompt(subject, [("a", tokens(2)), ("a", tokens(2))])
    with pytest.raises(UnsupportedError, match="no segment 'picture'"):
        prefill_around(subject, prompt, {"picture": image})
    with pytest.raises(UnsupportedError, match="has 4 tokens and 6 entries"):
        prefill_around(subject, prompt, {"after": image})
    with pytest.raises(UnsupportedError, match="last token must be run"):
        prefill_around(subject, prompt, {"after": entries_of(cache, prompt, "after")})
