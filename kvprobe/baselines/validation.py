"""The validation edit: a method that cannot do it on this model is not used on it (protocol 5.8, critique ED10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe.baselines.base import Background, WeightEdit, WeightRequest
from kvprobe.baselines.mlp import decisions
from kvprobe.errors import SampleError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Choice = tuple[tuple[int, ...], int, int]
"""A prompt, the answer it gets now and the other one it could get."""


@dataclass(frozen=True)
class ValidationEdit:
    """An edit whose outcome is not reported elsewhere.

    Args:
        request: must be answered by its target.
        other_answer: the first token of the answer it got before.
        neighbours: prompts about something else, which must keep their answers.
    """

    request: WeightRequest
    other_answer: int
    neighbours: tuple[Choice, ...]


@dataclass(frozen=True)
class Validation:
    """What the validation edits found.

    Attributes:
        switched: share of edits whose request is answered by the target.
        kept: share of neighbours that keep their answer.
        edits, neighbours: how many there were.
        usable: whether both shares are large enough.
    """

    switched: float
    kept: float
    edits: int
    neighbours: int
    usable: bool


def validate(
    subject: Subject, method: WeightEdit, edits: Sequence[ValidationEdit], background: Background, *, least: float
) -> Validation:
    """Make every edit, and see whether requests switch and neighbours stay, each in a share of at least `least`.

    Raises:
        SampleError: there is no edit, or none has a neighbour.
    """
    if not edits or not any(edit.neighbours for edit in edits):
        raise SampleError("A weight edit is validated on at least one request and one neighbour; give both.")
    switched, kept = [], []
    for edit in edits:
        asked = [edit.request.token_ids, *(prompt for prompt, _, _ in edit.neighbours)]
        with method.applied(subject, [edit.request], background):
            logits = decisions(subject, asked)
        switched.append(bool(logits[0, edit.request.target_ids[0]] > logits[0, edit.other_answer]))
        kept += [bool(row[now] > row[other]) for row, (_, now, other) in zip(logits[1:], edit.neighbours, strict=True)]
    shares = sum(switched) / len(switched), sum(kept) / len(kept)
    return Validation(*shares, len(switched), len(kept), min(shares) >= least)
