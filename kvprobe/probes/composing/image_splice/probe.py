"""Image KV that was computed elsewhere: at its own place, after other text, far away, and in a prompt it changes.

Each picture is drawn, encoded by the model's own vision tower, and run once in a short context (one token and the
picture). Its entries are then put into the whole prompt, the text around them being run anew, and the answer is
compared with that of a full prefill of the same prompt. The whole prompt stands at positions `shift`, `shift + 1`, ...,
so the entries move by `shift` and by the text before the picture, on all three axes of M-RoPE (protocol 13, critique
MU1, MU2).

    same_place       the entries of the full prefill itself: exact by causality
    moved            the entries of the short context, rotated by the true difference of the two triples
    temporal_only    the same, rotated along the temporal axis alone, as the paper words it
    no_rotation      the same, not rotated
    wrong_image      the entries of the pair's other picture, moved
    swapped          an edit: the new picture's entries in the cached prompt of the old one, nothing else run but the
                     decision token
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from kvprobe.composing.images import entries_of, prefill_around
from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.forward import Forward, forward
from kvprobe.engine.operations import overwrite
from kvprobe.engine.readout import read
from kvprobe.engine.visual import Piece, VisualPrompt, prefill_visual, visual_prompt
from kvprobe.organisms.picture_prompts import drawn_parts
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.picture_question import IMAGE

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

WRONG_IMAGE = "wrong_image"
ARMS = ("moved", "temporal_only", "no_rotation", WRONG_IMAGE)
"""Arms measured at every shift."""


@PROBES.register("image_splice")
class ImageSplice(Probe):
    """How far a prompt with an image's KV taken from elsewhere answers as a full prefill does."""

    shifts: tuple[int, ...] = Field((0, 256, 4096, 16384), min_length=1, description="positions before the prompt")
    side: int = Field(2, ge=1, description="rows, and columns, of image tokens of a picture")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each arm and shift, and those of `same_place` and `swapped`.

        Raises:
            UnsupportedError: the model reads no images, or a prompt has no picture.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            case = _case(subject, pair, self.side)
            rows += [{"pair": index, **row} for row in _measured(subject, case, self.shifts)]
            progress(index + 1, len(pairs))
        return rows

    def preview(self, subject: Subject, pair: Pair) -> Mapping[str, float]:
        """What the inclusion gate reads of a pair, from one prefill of each prompt with its pictures."""
        answers = pair.base_answer_id, pair.donor_answer_id
        old, new = (drawn_parts(subject, context, pair.scenario.seed, self.side) for context in (pair.base, pair.donor))
        base_logits, donor_logits = (
            prefill_visual(subject, visual_prompt(subject, list(parts.items()))).logits for parts in (old, new)
        )
        return gate_columns(read(base_logits, *answers), read(donor_logits, *answers), 0.0)


@dataclass(frozen=True, eq=False)
class ImageCase:
    """A pair with its pictures seen: parts of both prompts, and the entries of both pictures in the short context."""

    pair: Pair
    base_parts: dict[str, Piece]
    donor_parts: dict[str, Piece]
    base_alone: KVCache
    donor_alone: KVCache

    def prompt(self, subject: Subject, shift: int, *, donor: bool = True) -> VisualPrompt:
        """The prompt with the new picture, or the old one, at positions from `shift` on."""
        return visual_prompt(subject, list((self.donor_parts if donor else self.base_parts).items()), shift)


def _case(subject: Subject, pair: Pair, side: int) -> ImageCase:
    base_parts, donor_parts = (
        drawn_parts(subject, context, pair.scenario.seed, side) for context in (pair.base, pair.donor)
    )
    opening = pair.base.token_ids[:1]
    alone = []
    for parts in (base_parts, donor_parts):
        short = visual_prompt(subject, [("opening", opening), (IMAGE, parts[IMAGE])])
        alone.append(entries_of(prefill_visual(subject, short).cache, short, IMAGE))
    return ImageCase(pair, base_parts, donor_parts, *alone)


def _measured(subject: Subject, case: ImageCase, shifts: Sequence[int]) -> Iterator[Measurement]:
    answers = case.pair.base_answer_id, case.pair.donor_answer_id
    here = case.prompt(subject, 0)
    full = prefill_visual(subject, here)
    stale = prefill_visual(subject, case.prompt(subject, 0, donor=False))
    same = prefill_around(subject, here, {IMAGE: entries_of(full.cache, here, IMAGE)})
    old, new = read(stale.logits, *answers), read(full.logits, *answers)
    common = gate_columns(old, new, abs(read(same.logits, *answers).margin - new.margin))
    yield common | {"arm": "same_place", "shift": 0, "key_error": 0.0, **_compared(same.logits, full.logits, answers)}
    edited = _swapped(subject, case, stale, full)
    yield common | {"arm": "swapped", "shift": 0, "key_error": 0.0, **_compared(edited, full.logits, answers)}
    for shift in shifts:
        prompt = case.prompt(subject, shift)
        native = prefill_visual(subject, prompt)
        for arm in ARMS:
            entries = _placed(subject, case, prompt, arm)
            result = prefill_around(subject, prompt, {IMAGE: entries})
            error = _key_error(entries_of(result.cache, prompt, IMAGE), entries_of(native.cache, prompt, IMAGE))
            compared = _compared(result.logits, native.logits, answers)
            yield common | {"arm": arm, "shift": shift, "key_error": error, **compared}


def _placed(subject: Subject, case: ImageCase, prompt: VisualPrompt, arm: str) -> KVCache:
    """The entries of an arm; the splice turns those that claim to stand elsewhere."""
    if arm == WRONG_IMAGE:
        return case.base_alone
    if arm == "moved":
        return case.donor_alone
    span = prompt.spans[IMAGE]
    axes = prompt.axes[:, span.start : span.end]
    turn = axes - case.donor_alone.triples
    wanted = {"no_rotation": torch.zeros(3, 1, dtype=torch.long), "temporal_only": torch.tensor([[1], [0], [0]])}[arm]
    tables = subject.architecture.rotary(subject.model)
    layers = [
        LayerKV.computed(table.rotate(layer.keys, turn * wanted), layer.values)
        for table, layer in zip(tables, case.donor_alone.layers, strict=True)
    ]
    places = torch.tensor(prompt.positions[span.start : span.end])
    return KVCache(tuple(layers), places, places, axes, axes)


def _swapped(subject: Subject, case: ImageCase, stale: Forward, full: Forward) -> Tensor:
    """Logits of the old prompt's cache with the new picture's own entries in it, the last token run anew."""
    span, ids = case.prompt(subject, 0).spans[IMAGE], case.prompt(subject, 0).token_ids
    edited, _ = overwrite(stale.cache.take(slice(0, len(ids) - 1)), span, full.cache)
    return forward(subject, ids[-1:], edited).logits


def _compared(logits: Tensor, full: Tensor, answers: tuple[int, int]) -> Measurement:
    """How an arm's answer differs from the full prefill's: nats, logits, and the answers themselves."""
    theirs, ours = full.double().log_softmax(-1), logits.double().log_softmax(-1)
    best = int(logits.argmax())
    return {
        "kl": max(0.0, float((theirs.exp() * (theirs - ours)).sum())),
        "logit_error": float((logits.double() - full.double()).abs().max()),
        "margin": read(logits, *answers).margin,
        "agrees": float(best == int(full.argmax())),
        "correct": float(best == answers[1]),
    }


def _key_error(mine: KVCache, native: KVCache) -> float:
    """Largest difference of first-layer keys from those of the full prefill, over the largest norm of a key."""
    a, b = mine.layers[0].keys.double(), native.layers[0].keys.double()
    return float((a - b).abs().max() / b.norm(dim=-1).max())
