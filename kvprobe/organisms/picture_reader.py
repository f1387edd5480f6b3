"""A tiny vision-language model of the Qwen2.5-VL architecture, trained from scratch to read drawn pictures."""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel, Qwen2_5_VLConfig

from kvprobe.engine.visual import prefill_visual, visual_prompt
from kvprobe.models.architectures.mrope import Qwen25VL
from kvprobe.models.files import settings_sha256, sha256_of
from kvprobe.models.images import ImageFeatures
from kvprobe.models.subject import Subject
from kvprobe.models.vision import patches
from kvprobe.organisms.picture_prompts import drawn_parts
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.pairs import align
from kvprobe.tasks.picture_question import IMAGE, OTHER, PictureQuestion, picture_context
from kvprobe.tasks.pictures import ASKED, ATTRIBUTES, Picture, draw
from kvprobe.tasks.tokenizer import BOS, END, PAD, UNKNOWN, build_tokenizer, words

NAME: Final = "qwen2.5-vl-picture-reader"
OPEN, CLOSE, IMAGE_TOKEN = "<open>", "<close>", "<image>"
SIZE: Final = 28
"""Height and width of its pictures in pixels: two by two image tokens."""


Progress = Callable[[int, int, float], None]
"""Told of the step, of how many, and of the share of right answers since it was last called."""


@dataclass(frozen=True)
class PictureRecipe:
    """Everything that determines a training run: the first steps show one picture a prompt, later ones two as well."""

    seed: int = 0
    steps: tuple[int, int] = (280, 420)
    batch: int = 48
    muon_rate: float = 0.01
    adamw_rate: float = 3e-3
    warm_up: int = 40
    most_notes: int = 3


@cache
def picture_vocabulary() -> dict[str, int]:
    """Every word the task `picture_question` can write, in a fixed order."""
    blank = Picture(*(known[0] for known in ATTRIBUTES.values()))
    texts = [word for known in ATTRIBUTES.values() for word in known]
    for attribute in ASKED:
        texts += [picture_context(filler_notes(), (blank, blank), asked, attribute).text for asked in (0, 1)]
    seen = dict.fromkeys((PAD, BOS, UNKNOWN, END, OPEN, CLOSE, IMAGE_TOKEN))
    for text in texts:
        seen.update(dict.fromkeys(words(text)))
    return {word: index for index, word in enumerate(seen)}


def picture_reader_config() -> Qwen2_5_VLConfig:
    """Its configuration."""
    known = picture_vocabulary()
    text = {
        "vocab_size": len(known),
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        "bos_token_id": known[BOS],
        "eos_token_id": known[END],
        "pad_token_id": known[PAD],
    }
    tower = {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 2,
        "patch_size": 7,
        "out_hidden_size": 96,
        "window_size": 28,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=known[IMAGE_TOKEN],
        vision_start_token_id=known[OPEN],
        vision_end_token_id=known[CLOSE],
        tie_word_embeddings=True,
    )


@dataclass(frozen=True, eq=False)
class PictureBatch:
    """Prompts of one layout: ids `[row, token]`, axes `[3, token]`, pixels `[patch, channel]`, grids `[image, 3]`."""

    ids: Tensor
    axes: Tensor
    pixels: Tensor
    grids: Tensor
    answers: Tensor


class PictureSampler:
    """Batches of prompts in which everything is drawn afresh; rows of one batch share their notes and layout."""

    def __init__(self, recipe: PictureRecipe) -> None:
        self._recipe = recipe
        self._rng = random.Random(f"pictures {recipe.seed}")
        self._noise = np.random.default_rng([recipe.seed, 7])
        self._tokenizer = build_tokenizer(picture_vocabulary())
        self._tower = picture_reader_config().vision_config

    def batch(self, pictures: int) -> PictureBatch:
        """One batch with `pictures` pictures in every prompt."""
        rng = self._rng
        notes = rng.sample(filler_notes(), rng.randint(0, self._recipe.most_notes))
        asked = rng.randrange(pictures)
        rows, answers, drawn = [], [], []
        axes = torch.empty(0)
        for _ in range(self._recipe.batch):
            attribute = rng.choice(ASKED)
            shown = [Picture(*(rng.choice(known) for known in ATTRIBUTES.values())) for _ in range(pictures)]
            context = picture_context(notes, shown, asked, attribute)
            ids, axes = self._prompt([(s.name, s.text) for s in context.segments])
            rows.append(ids)
            answers.append(picture_vocabulary()[getattr(shown[asked], attribute)])
            drawn += [patches(self._pixels(picture), self._tower) for picture in shown]
        flat, grids = zip(*drawn, strict=True)
        return PictureBatch(torch.tensor(rows), axes, torch.cat(flat), torch.cat(grids), torch.tensor(answers))

    def _pixels(self, picture: Picture) -> Tensor:
        pixels = torch.from_numpy(draw(picture, SIZE, self._noise))
        mean, deviation = (torch.tensor(values)[:, None, None] for values in Qwen25VL.pixel_scale)
        return (pixels - mean) / deviation

    def _prompt(self, segments: list[tuple[str, str]]) -> tuple[list[int], Tensor]:
        known, start = picture_vocabulary(), 1
        ids, places = [known[BOS]], [torch.zeros(3, 1, dtype=torch.long)]
        image = ImageFeatures(torch.empty(4, 0), (2, 2))
        for name, text in segments:
            if name in (IMAGE, OTHER):
                ids += [known[OPEN], *[known[IMAGE_TOKEN]] * len(image), known[CLOSE]]
                places += [_line(start, 1), image.axes(start + 1), _line(start + 3, 1)]
                start += 4
            else:
                piece = [known[word] for word in words(text)]
                ids += piece
                places.append(_line(start, len(piece)))
                start += len(piece)
        return ids, torch.cat(places, dim=1)


def _line(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).expand(3, -1)


def answer_logits(model: PreTrainedModel, batch: PictureBatch) -> Tensor:
    """`[row, vocab]` at the last token."""
    output = model(
        input_ids=batch.ids,
        position_ids=batch.axes[:, None].expand(-1, len(batch.ids), -1),
        pixel_values=batch.pixels,
        image_grid_thw=batch.grids,
        logits_to_keep=1,
        use_cache=False,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def train_picture_organism(out: Path, *, seed: int = 0, on_progress: Progress | None = None) -> dict[str, Any]:
    """Train, pack and measure the picture reader; returns its card."""
    from kvprobe.models.loader import load_subject

    recipe = PictureRecipe(seed=seed)
    model, state = train_picture_reader(recipe, on_progress)
    pack_picture_reader(model, recipe, state, out)
    card = json.loads((out / "card.json").read_text(encoding="utf-8"))
    card["measured"] = evaluate_picture_reader(load_subject(str(out)))
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return dict(card)


def train_picture_reader(
    recipe: PictureRecipe, on_progress: Progress | None = None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train on answers alone; returns the model and what the run was.

    `on_progress` is called every 20 steps.
    """
    started = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = AutoModelForImageTextToText.from_config(picture_reader_config(), attn_implementation="sdpa").float()
    sampler, total = PictureSampler(recipe), sum(recipe.steps)
    optimizers = _optimizers(model, recipe)
    right = []
    for step, pictures in enumerate(_schedule(recipe)):
        batch = sampler.batch(pictures)
        logits = answer_logits(model, batch)
        loss = torch.nn.functional.cross_entropy(logits, batch.answers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / recipe.warm_up, 2.5 * (total - step) / total)
        for optimizer, base in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * rate
            optimizer.step()
            optimizer.zero_grad()
        right.append(float((logits.argmax(-1) == batch.answers).float().mean()))
        if on_progress is not None and step % 20 == 19:
            on_progress(step + 1, total, sum(right[-20:]) / 20)
    seconds = round(time.perf_counter() - started)
    return model.eval(), {"steps": total, "seconds": seconds, "answers": total * recipe.batch}


def _schedule(recipe: PictureRecipe) -> Iterator[int]:
    first, second = recipe.steps
    yield from (1 for _ in range(first))
    yield from (1 + (step % 3 > 0) for step in range(second))


def _optimizers(model: PreTrainedModel, recipe: PictureRecipe) -> list[tuple[torch.optim.Optimizer, float]]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        (torch.optim.Muon(matrices, lr=recipe.muon_rate, momentum=0.95, weight_decay=0.01), recipe.muon_rate),
        (torch.optim.AdamW(others, lr=recipe.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0), recipe.adamw_rate),
    ]


def pack_picture_reader(model: PreTrainedModel, recipe: PictureRecipe, state: dict[str, Any], out: Path) -> None:
    """Write the float16 weights, the configuration, the tokenizer and the card, without measurements."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    model.config.dtype = torch.float32
    model.config.save_pretrained(out)
    build_tokenizer(picture_vocabulary()).save_pretrained(out)
    weights = {name: parameter.detach().half().contiguous() for name, parameter in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    card = {
        "name": NAME,
        "architecture": "qwen2_5_vl",
        "kind": "picture-reader",
        "description": "Qwen2.5-VL architecture, trained from scratch to answer questions about drawn pictures",
        "licence": "Apache-2.0",
        "pressure": "answers to questions about one of one or two pictures; no other token is trained on",
        "seed": recipe.seed,
        **state,
        "machine": f"{torch.get_num_threads()} thread(s), {platform.machine()}, torch {torch.__version__}",
        "recipe": asdict(recipe),
        "weights_sha256": sha256_of(out / "model.safetensors"),
        "settings_sha256": settings_sha256(out),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def evaluate_picture_reader(subject: Subject, size: int = 100) -> dict[str, float]:
    """Share of right answers to fresh prompts, both of each of `size` pairs, with one and with two pictures."""
    right: dict[str, list[bool]] = {}
    for pictures in (1, 2):
        for prompts in PictureQuestion(size=size, seed=1_000_003, pictures=pictures, notes=(0, 3)).prompt_pairs():
            pair = align(prompts, subject.tokenizer)
            answers = ((pair.base, pair.base_answer_id), (pair.donor, pair.donor_answer_id))
            for context, answer in answers:
                parts = drawn_parts(subject, context, pair.scenario.seed, 2)
                logits = prefill_visual(subject, visual_prompt(subject, list(parts.items()))).logits
                for name in ("accuracy", f"accuracy_{pair.scenario.attributes['attribute']}", f"pictures_{pictures}"):
                    right.setdefault(name, []).append(int(logits.argmax()) == answer)
    shares = {name: round(sum(found) / len(found), 4) for name, found in right.items()}
    return shares | {"prompts": len(right["accuracy"])}
