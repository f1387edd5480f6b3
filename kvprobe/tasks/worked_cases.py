"""Worked cases: decided examples of other skeletons, told as turns of the chat before each prompt of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvprobe.errors import ConfigError
from kvprobe.tasks.base import MOST, Task
from kvprobe.tasks.context import Context
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.pairs import PromptPair

Turn = tuple[str, str]
_ROUNDS = 8


def with_worked_cases(task: Task, pairs: Sequence[PromptPair], count: int) -> list[PromptPair]:
    """The task's pairs, each after `count` worked cases in its own wording.

    The same cases stand before all pairs of a wording, so that their cache can be shared.

    Raises:
        ConfigError: see `worked_cases`.
    """
    turns = {wording: worked_cases(task, wording, count) for wording in {pair.scenario.wording for pair in pairs}}

    def told(context: Context, pair: PromptPair) -> Context:
        return replace(context, turns=turns[pair.scenario.wording])

    return [
        replace(
            pair,
            base=told(pair.base, pair),
            donor=told(pair.donor, pair),
            variants={name: told(context, pair) for name, context in pair.variants.items()},
        )
        for pair in pairs
    ]


def worked_cases(task: Task, wording: str, count: int) -> tuple[Turn, ...]:
    """Two turns for each of `count` skeletons of the split `train`, none of which is scored: one for each value.

    Answers are balanced by construction: each action, each stated case and each place among the options is right once
    for every skeleton. Which value comes first alternates.

    Raises:
        ConfigError: the task is not made of skeletons, its answers come after a chain of thought, or there are fewer.
    """
    if not isinstance(task, GatedDecision) or task.mode == "think":
        raise ConfigError("worked_cases need a task of gated decisions that are answered directly; leave the key out.")
    scored = {each.name for each in skeletons(task.split) if task.skeletons is None or each.name in task.skeletons}
    free = tuple(each.name for each in skeletons("train") if each.name not in scored)
    if len(free) < count:
        raise ConfigError(f"worked_cases: {count} were asked for, and only {len(free)} skeletons are not scored.")
    size = min(MOST, _ROUNDS * len(free))
    pool = task.model_copy(update={"split": "train", "skeletons": free, "wordings": (wording,), "size": size})
    chosen: dict[str, PromptPair] = {}
    for pair in pool.prompt_pairs():
        chosen.setdefault(pair.scenario.skeleton, pair)
    turns: list[Turn] = []
    for place, pair in enumerate(list(chosen.values())[:count]):
        both = [_turn(pair.base, pair.base_answer), _turn(pair.donor, pair.donor_answer)]
        turns += both[::-1] if place % 2 else both
    return tuple(turns)


def _turn(context: Context, answer: str) -> Turn:
    asked = "".join(segment.text for segment in context.segments if segment.name != "cue")
    cue = "".join(segment.text for segment in context.segments if segment.name == "cue")
    return asked, f"{cue} {answer}"
