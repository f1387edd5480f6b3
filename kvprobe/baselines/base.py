"""What a weight edit is: requests to answer otherwise, a change of the model, and the same weights again afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from kvprobe.errors import UnsupportedError
from kvprobe.registry import KINDS, Registry

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

WEIGHT_EDITS: Registry[type[WeightEdit]] = Registry(KINDS["WEIGHT_EDITS"])


@dataclass(frozen=True)
class WeightRequest:
    """One prompt that shall be answered otherwise.

    Args:
        token_ids: of the whole prompt, its last token included.
        position: of the subject token: the last token of the field's value, whose MLP input is the key of the edit.
        target_ids: the answer's tokens.

    Raises:
        UnsupportedError: the subject token stands outside the prompt, or there is no answer.
    """

    token_ids: tuple[int, ...]
    position: int
    target_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.position < len(self.token_ids):
            raise UnsupportedError(
                f"The subject token of a prompt of {len(self.token_ids)} tokens cannot stand at {self.position}."
            )
        if not self.target_ids:
            raise UnsupportedError("A weight edit needs at least one token of the answer it shall bring about.")

    @property
    def answered(self) -> tuple[int, ...]:
        """The prompt and all of the answer but its last token: what a pass over the answer runs."""
        return (*self.token_ids, *self.target_ids[:-1])


@dataclass(frozen=True)
class Background:
    """What a weight edit is to leave alone.

    Args:
        texts: real text, as token ids; ROME and MEMIT keep what the MLP makes of its tokens.
        retain: prompts whose answers LoRA keeps.
    """

    texts: tuple[tuple[int, ...], ...] = ()
    retain: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class WeightChange:
    """A weight edit in force.

    Attributes:
        probability: of the target answers while the edit was made, smallest of all requests.
        steps: of optimisation, summed over requests.
        suspended: for adapters that serve one request alone, a block in which others are answered without it.
    """

    probability: float
    steps: int
    suspended: Callable[[], AbstractContextManager[Any]] | None = None


class Parameters(BaseModel):
    """Base of all weight edits' parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WeightEdit(ABC):
    """Base of all weight edits.

    An edit is in force inside a `with` block; when it ends, also by an exception, every weight has the bits it had.
    """

    name: ClassVar[str]
    Parameters: ClassVar[type[Parameters]] = Parameters
    parameters: Any

    def __init__(self, parameters: Any = None) -> None:
        self.parameters = parameters if parameters is not None else self.Parameters()

    def prepare(self, subject: Subject, background: Background) -> None:  # noqa: B027
        """What is computed once for all edits of a subject; by default nothing. Kept for as long as the subject is."""

    @abstractmethod
    def applied(
        self, subject: Subject, requests: Sequence[WeightRequest], background: Background
    ) -> AbstractContextManager[WeightChange]:
        """The model with the requests' answers, inside a `with` block.

        Raises:
            UnsupportedError: no request, more than the method takes, or no background it needs.
        """


@contextmanager
def restored(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block in which `weights` may be written to; afterwards they hold the bits they held."""
    before = [weight.detach().clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)


def need(requests: Sequence[WeightRequest], method: str, most: int | None = None) -> None:
    """Check the number of requests.

    Raises:
        UnsupportedError: there is none, or there are more than `most`.
    """
    if not requests or (most is not None and len(requests) > most):
        allowed = "at least one request" if most is None else f"1 to {most} requests at once"
        raise UnsupportedError(f"{method} edits by {allowed}, not {len(requests)}.")
