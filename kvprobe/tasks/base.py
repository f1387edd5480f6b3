"""A task makes prompt pairs; it knows nothing of models or tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from kvprobe.registry import KINDS, Registry
from kvprobe.tasks.pairs import PromptPair

TASKS: Registry[type[Task]] = Registry(KINDS["TASKS"])


class Task(BaseModel, ABC):
    """Base of all tasks: validated parameters and a stream of prompt pairs.

    The pairs depend on the parameters alone, and the i-th pair does not depend on how many are asked for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @abstractmethod
    def prompt_pairs(self) -> Iterator[PromptPair]:
        """The pairs, in a fixed order."""
