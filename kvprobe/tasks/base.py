"""A task makes prompt pairs; it knows nothing of models or tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, model_validator

from kvprobe.registry import KINDS, Registry
from kvprobe.tasks.pairs import PromptPair

MOST = 10_000
"""What no parameter of a task may exceed, but a seed: pairs, notes, turns."""


def _in_order(ends: tuple[int, int]) -> tuple[int, int]:
    if ends[0] > ends[1]:
        raise ValueError(f"give the fewest before the most, not {ends[0]} before {ends[1]}")
    return ends


Range = Annotated[tuple[NonNegativeInt, NonNegativeInt], AfterValidator(_in_order)]
"""Fewest and most."""


def at_most(number: int) -> AfterValidator:
    """A `Range` that ends at `number`."""

    def check(ends: tuple[int, int]) -> tuple[int, int]:
        if ends[1] > number:
            raise ValueError(f"there are {number} at most")
        return ends

    return AfterValidator(check)


TASKS: Registry[type[Task]] = Registry(KINDS["TASKS"])


class Task(BaseModel, ABC):
    """Base of all tasks: validated parameters and a stream of prompt pairs.

    The pairs depend on the parameters alone, and the i-th pair does not depend on how many are asked for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        for name, value in self:
            values = value if isinstance(value, tuple) else (value,)
            if not values:
                raise ValueError(f"{name} is empty; name at least one")
            if name != "seed" and any(isinstance(each, int) and not 0 <= each <= MOST for each in values):
                raise ValueError(f"{name} must be from 0 to {MOST:,}")
        return self

    @abstractmethod
    def prompt_pairs(self) -> Iterator[PromptPair]:
        """The pairs, in a fixed order."""
