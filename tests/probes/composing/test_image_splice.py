"""Laws of the image splice probe, its task and the training prompts of the picture reader, on a random model."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import build, tiny
from worded_models import effects_of, margin_of, measured

from kvprobe.engine.visual import visual_prompt
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.models.catalogue import organism_names
from kvprobe.models.subject import Subject
from kvprobe.models.vision import encode_image, normalised, patches
from kvprobe.organisms.picture_reader import (
    NAME,
    PictureRecipe,
    PictureSampler,
    evaluate_picture_reader,
    pack_picture_reader,
    picture_reader_config,
    picture_vocabulary,
    train_picture_reader,
)
from kvprobe.probes.composing.image_splice.probe import ARMS, ImageSplice
from kvprobe.tasks.context import tokenize
from kvprobe.tasks.pairs import Pair, align
from kvprobe.tasks.picture_question import IMAGE, OTHER, PictureQuestion
from kvprobe.tasks.pictures import ATTRIBUTES, COLOURS, Picture, draw
from kvprobe.tasks.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(picture_vocabulary())
SHIFTS = (0, 300)
PROBE = ImageSplice(shifts=SHIFTS)


@cache
def reader(dtype: torch.dtype = torch.float64) -> Subject:
    """A picture reader that was never trained."""
    made = build(picture_reader_config(), "untrained", dtype)
    return Subject(made.name, made.model, TOKENIZER, made.architecture, made.identity)


def pairs_of(size: int, **parameters: Any) -> list[Pair]:
    return [align(pair, TOKENIZER) for pair in PictureQuestion(size=size, **parameters).prompt_pairs()]


@cache
def rows_of(pictures: int = 2) -> pd.DataFrame:
    return measured(PROBE, reader(), pairs_of(3, pictures=pictures))


def plain_run(pair: Pair, context: Any) -> dict[str, Any]:
    """What the model library makes of a prompt from pixels: its own inputs, for a forward of its own."""
    config = reader().model.config
    ids: list[int] = [*context.token_ids[: min(span.start for span in context.spans.values())]]
    flat, grids = [], []
    for name, span in context.spans.items():
        piece = context.token_ids[span.start : span.end]
        if name in (IMAGE, OTHER):
            pixels = draw(
                Picture.of(TOKENIZER.decode(piece)), 28, np.random.default_rng([pair.scenario.seed, name == OTHER])
            )
            cut, grid = patches(normalised(reader(), torch.from_numpy(pixels)), config.vision_config)
            flat.append(cut.double())
            grids.append(grid)
            ids += [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id]
        else:
            ids += piece
    token_ids = torch.tensor([ids])
    return {
        "input_ids": token_ids,
        "pixel_values": torch.cat(flat),
        "image_grid_thw": torch.cat(grids),
        "mm_token_type_ids": (token_ids == config.image_token_id).int(),
    }


@pytest.mark.parametrize("pictures", [1, 2])
def test_margins_against_plain_hugging_face(pictures: int) -> None:
    rows = rows_of(pictures).groupby("pair").first()
    for index, pair in enumerate(pairs_of(3, pictures=pictures)):
        for column, context in (("m_base", pair.base), ("m_donor", pair.donor)):
            with torch.no_grad():
                logits = reader().model(**plain_run(pair, context)).logits[0, -1]
            assert rows[column][index] == pytest.approx(margin_of(pair, logits), abs=1e-9)
            assert PROBE.preview(reader(), pair)[column] == pytest.approx(margin_of(pair, logits), abs=1e-9)


def test_a_swapped_image_is_a_patched_cache_of_plain_hugging_face() -> None:
    (pair, *_), model = pairs_of(3, pictures=2), reader().model
    with torch.no_grad():
        runs = [plain_run(pair, context) for context in (pair.base, pair.donor)]
        caches = [model(**run, use_cache=True).past_key_values for run in runs]
        ids = runs[0]["input_ids"]
        kinds = runs[0]["mm_token_type_ids"]
        axes, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=runs[0]["image_grid_thw"])
        image = kinds[0].nonzero()[:, 0]
        asked = image[:4] if pair.scenario.attributes["asked"] == "one" else image[4:]
        for stale, fresh in zip(caches[0].layers, caches[1].layers, strict=True):
            stale.keys[:, :, asked], stale.values[:, :, asked] = fresh.keys[:, :, asked], fresh.values[:, :, asked]
        caches[0].crop(-1)
        logits = model(ids[:, -1:], position_ids=axes[:, :, -1:], past_key_values=caches[0], use_cache=True).logits[
            0, -1
        ]
    rows = rows_of()
    found = rows[(rows["pair"] == 0) & (rows["arm"] == "swapped")]["margin"].iloc[0]
    assert found == pytest.approx(margin_of(pair, logits), abs=1e-9)
    assert found != rows[rows["pair"] == 0]["m_base"].iloc[0]


def test_at_its_own_place_it_is_exact_and_elsewhere_keys_tell_the_arms_apart() -> None:
    rows = rows_of()
    at = rows.set_index("arm")
    assert at.loc["same_place", "logit_error"].max() < 1e-12
    assert (at.loc["same_place", "agrees"] == 1).all()
    assert set(rows["arm"]) == {"same_place", "swapped", *ARMS}
    assert at.loc["moved", "key_error"].max() < 1e-4
    for arm in ("no_rotation", "temporal_only"):
        # Even at shift 0 there is text before the image that the short context lacks.
        assert at.loc[arm, "key_error"].min() > 0.05
    assert (at.loc["moved", "logit_error"] > 1e-6).all()


def test_effects_are_those_of_the_rows() -> None:
    rows = rows_of()
    effects = effects_of(PROBE, rows)
    assert effects["same_place.logit_error"].estimate < 1e-12
    moved = rows[(rows["arm"] == "moved") & (rows["shift"] == 300)]["kl"].to_numpy()
    one_axis = rows[(rows["arm"] == "temporal_only") & (rows["shift"] == 300)]["kl"].to_numpy()
    wrong = rows[(rows["arm"] == "wrong_image") & (rows["shift"] == 300)]["kl"].to_numpy()
    assert effects["axes_gain_300.kl"].estimate == pytest.approx((one_axis - moved).mean())
    assert effects["moved_300.kl_share"].estimate == pytest.approx(moved.sum() / wrong.sum())


def test_a_model_of_text_or_a_prompt_without_a_picture_is_refused() -> None:
    (pair,) = pairs_of(1)
    with pytest.raises(UnsupportedError, match="reads no images"):
        PROBE.measure(tiny("qwen3"), [pair], lambda done, total: None)
    bare = Pair(pair.base, pair.donor, pair.field, 1, 2, pair.scenario)
    bare.base.spans.pop(IMAGE)
    with pytest.raises(UnsupportedError, match="picture_question"):
        PROBE.measure(reader(), [bare], lambda done, total: None)


@given(seed=st.integers(0, 999), pictures=st.sampled_from([1, 2]))
def test_a_pair_differs_in_what_is_asked_for_alone(seed: int, pictures: int) -> None:
    few, many = (list(PictureQuestion(size=size, seed=seed, pictures=pictures).prompt_pairs()) for size in (3, 6))
    assert few == many[:3]
    for pair in many:
        shown = [{segment.name: segment.text for segment in context.segments} for context in (pair.base, pair.donor)]
        old, new = (Picture.of(texts[IMAGE]) for texts in shown)
        attribute = pair.scenario.attributes["attribute"]
        assert (getattr(old, attribute), getattr(new, attribute)) == (pair.base_answer, pair.donor_answer)
        assert all(getattr(old, name) == getattr(new, name) for name in ATTRIBUTES if name != attribute)
        assert (OTHER in shown[0]) == (pictures == 2)
        if pictures == 2:
            assert getattr(Picture.of(shown[0][OTHER]), attribute) not in (pair.base_answer, pair.donor_answer)


@given(seed=st.integers(0, 9999))
def test_a_drawing_shows_its_colour_in_its_corner(seed: int) -> None:
    rng = np.random.default_rng(seed)
    picture = Picture(*(rng.choice(known) for known in ATTRIBUTES.values()))
    pixels = draw(picture, 28, rng)
    ground = np.abs(pixels - 0.4).max(0) > 0.35
    row, column = (places.mean() for places in np.nonzero(ground))
    assert ("north" if row < 14 else "south") + ("west" if column < 14 else "east") == picture.corner
    mean = pixels[:, ground].mean(1)
    assert min(COLOURS, key=lambda name: float(np.square(mean - COLOURS[name]).sum())) == picture.colour
    share = ground.sum() / 28**2
    assert 0.03 < share < 0.2


def test_descriptions_are_checked() -> None:
    with pytest.raises(ConfigError, match="describes no picture"):
        Picture.of("red circle")
    with pytest.raises(ConfigError, match="the colour 'pink'"):
        Picture.of("pink circle northwest")


@pytest.mark.parametrize("pictures", [1, 2])
def test_training_prompts_are_those_of_the_task(pictures: int) -> None:
    batch = PictureSampler(PictureRecipe(batch=2)).batch(pictures)
    subject, known = reader(), picture_vocabulary()
    names = {index: word for word, index in known.items()}
    # Every image of a row becomes the described segment again, and the task's own way makes the prompt.
    text = " ".join(names[int(token)] for token in batch.ids[0][1:])
    described = " ".join(["<open>", *["<image>"] * 4, "<close>"])
    assert text.count(described) == pictures
    image = encode_image(subject, torch.zeros(3, 28, 28))
    parts: list[Any] = [("bos", [known["<bos>"]])]
    for number, piece in enumerate(text.split(described)):
        parts.append((f"text {number}", [known[word] for word in piece.split(" ") if word]))
        if number < pictures:
            parts.append((f"image {number}", image))
    prompt = visual_prompt(subject, parts)
    assert list(prompt.token_ids) == batch.ids[0].tolist()
    assert torch.equal(prompt.axes, batch.axes)
    assert {names[int(answer)] for answer in batch.answers} <= {word for words in ATTRIBUTES.values() for word in words}


def test_the_vocabulary_holds_every_word_of_the_task() -> None:
    unknown = TOKENIZER.unk_token_id
    for pair in PictureQuestion(size=40, pictures=2, notes=(0, 5)).prompt_pairs():
        assert unknown not in tokenize(pair.base, TOKENIZER).token_ids


def test_training_is_deterministic_and_packs_what_loads(tmp_path: Any) -> None:
    from kvprobe.models.loader import load_subject

    recipe = PictureRecipe(steps=(1, 1), batch=2)
    model, state = train_picture_reader(recipe)
    again, _ = train_picture_reader(recipe)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert state["answers"] == 4
    pack_picture_reader(model, recipe, state, tmp_path / "tiny-reader")
    subject = load_subject(str(tmp_path / "tiny-reader"), device="cpu")
    for mine, theirs in zip(model.parameters(), subject.model.parameters(), strict=True):
        assert torch.equal(mine.half().float(), theirs)
    (pair,) = pairs_of(1)
    rows = PROBE.measure(subject, [pair], lambda done, total: None)
    assert rows[0]["arm"] == "same_place"
    assert rows[0]["logit_error"] < 1e-4


@pytest.mark.skipif(NAME not in organism_names(), reason="the picture reader does not ship with this checkout")
def test_the_picture_reader_that_ships_reads_pictures() -> None:
    from kvprobe.models.loader import load_subject

    measured = evaluate_picture_reader(load_subject(NAME), 10)
    assert measured["prompts"] == 40
    assert measured["accuracy"] > 0.85


def test_a_picture_reader_is_of_one_family_only() -> None:
    from typer.testing import CliRunner

    from kvprobe.cli.organisms import organisms_app

    result = CliRunner().invoke(organisms_app, ["train", "--family", "qwen3", "--kind", "picture-reader"])
    assert result.exit_code == 2
    assert "qwen2_5_vl" in result.output
