"""Pairs of training skeletons, for probes that train or choose on prompts which no evaluation sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvprobe.errors import AlignmentError, ConfigError, SampleError
from kvprobe.tasks.base import TASKS
from kvprobe.tasks.pairs import Pair, align

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def training_pairs(subject: Subject, task: str, size: int, seed: int, like: Sequence[Pair]) -> list[Pair]:
    """Pairs of a task's training skeletons, in the chat template where the pairs `like` are.

    Raises:
        ConfigError: the task has no training split.
        SampleError: the pairs to be evaluated share a skeleton with them, or none of them aligns.
        UnknownNameError: there is no such task.
    """
    wrapped = "chat_prefix" in like[0].base.spans
    # Templates without a thinking switch ignore it.
    chat: dict[str, Any] | None = {"enable_thinking": False} if wrapped else None
    pairs = []
    try:
        training = TASKS.get(task).model_validate({"size": size, "seed": seed, "split": "train"})
    except ValidationError as error:
        raise ConfigError(f"The task {task!r} has no training split; train on gated_decision.") from error
    for prompts in training.prompt_pairs():
        try:
            pairs.append(align(prompts, subject.tokenizer, chat=chat))
        except AlignmentError:
            continue  # as in every experiment: values that this tokenizer cuts into spans of different length
    shared = {pair.scenario.skeleton for pair in pairs} & {pair.scenario.skeleton for pair in like}
    if shared:
        raise SampleError(f"Training and evaluation share the skeleton {min(shared)!r}; evaluate on split: held_out.")
    if not pairs:
        raise SampleError(f"The tokenizer of {subject.name} aligns no training pair; train on another task.")
    return pairs
