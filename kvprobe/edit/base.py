"""What an edit method is: from the stale cache of a prompt to one that should decide by the new value."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import Forward, forward
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.registry import KINDS, Registry
from kvprobe.tasks.context import Span, TokenizedContext

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

EDIT_METHODS: Registry[type[EditMethod]] = Registry(KINDS["EDIT_METHODS"])


@dataclass(frozen=True, eq=False)
class CachedPrompt:
    """A prompt, where its segments stand, and the KV cache of all its tokens but the last.

    The last token is never cached: running it gives the decision. `cache.positions` are 0, 1, 2, ..., or rise with
    holes where the prompt has `gaps`: spans count tokens, and edits by their positions are refused then.

    Raises:
        UnsupportedError: cache and tokens do not fit.
    """

    token_ids: tuple[int, ...]
    spans: Mapping[str, Span]
    cache: KVCache
    gaps: bool = False

    def __post_init__(self) -> None:
        before = len(self.token_ids) - 1
        places = torch.arange(before)
        if len(self.cache) != before or not (self.gaps or torch.equal(self.cache.positions, places)):
            raise UnsupportedError(
                f"The cache of a prompt of {len(self.token_ids)} tokens must hold positions 0 to {before - 1}, not "
                f"{len(self.cache)} entries; leave out the last token, which is run anew for every decision."
            )

    @classmethod
    def prefilled(cls, subject: Subject, token_ids: Sequence[int], spans: Mapping[str, Span]) -> CachedPrompt:
        """A prompt prefilled by the model."""
        cache = forward(subject, token_ids[:-1]).cache
        return cls(tuple(token_ids), dict(spans), cache)

    def span(self, name: str) -> Span:
        """Where a segment stands.

        Raises:
            ConfigError: there is no such segment.
        """
        if name not in self.spans:
            raise ConfigError(f"The prompt has no segment {name!r}; it has {', '.join(self.spans)}.")
        return self.spans[name]

    def refuse_gaps(self) -> None:
        """Edits go by positions, which are not those of the tokens in a prompt with gaps.

        Raises:
            UnsupportedError: the prompt has gaps.
        """
        if self.gaps:
            raise UnsupportedError(
                "The prompt has a gap, so its entries do not stand where its tokens do and it cannot be edited "
                "further; remove with behind='rotated' or 'recomputed'."
            )

    def decide(self, subject: Subject) -> Forward:
        """Run the last token: `logits` `[vocab]` of the decision."""
        return forward(subject, self.token_ids[-1:], self.cache)


def line_segments(field: str) -> tuple[str, str]:
    """Names of the segments that hold what stands before and after a field's value in its line."""
    return f"before {field}", f"after {field}"


@dataclass(frozen=True)
class FieldEdit:
    """What changes, and in which words the change can be said. All ids are as in the middle of a text.

    Args:
        field: name of the segment whose value changes.
        new_ids: its new tokens.
        erratum_ids: the line that says so ("Update: the order status is now refunded; ...").
        line_ids: what stands before and after the value in its line of the session ("order status:", end of line).
        insert_before: the segment an appended line is put in front of; this segment and all after it are run anew.
        moved: the whole prompt, tokenised, with the new value's line in front of a segment; where the text is known.
    """

    field: str
    new_ids: tuple[int, ...]
    erratum_ids: tuple[int, ...] = ()
    line_ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    insert_before: str = "task"
    moved: Callable[[str], TokenizedContext] | None = dataclasses.field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class Edited:
    """What a method made of the stale prompt.

    Attributes:
        prompt: the edited prompt, ready to decide.
        receipt: what it cost, from what was really run.
        computed: positions of `prompt` whose entries the model computed for this edit; all others are bit-identical
            to the stale cache, at their old or at a rotated position.
    """

    prompt: CachedPrompt
    receipt: Receipt
    computed: tuple[int, ...] = dataclasses.field(default=())

    def then(self, other: Edited) -> Edited:
        """This edit and another one made on top of it: `other`, at the cost of both.

        `computed` of the first must stay where it was: no later edit moves what an earlier one computed.
        """
        computed = tuple(sorted({*self.computed, *other.computed}))
        return replace(other, receipt=self.receipt + other.receipt, computed=computed)


class Parameters(BaseModel):
    """Base of all methods' parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EditMethod(ABC):
    """Base of all edit methods. One that needs more than the stale cache says so in `upper_bound`.

    A method starts from the stale cache and never sees the answer. `tokens` is what it declares to run; the tests
    compare it with what a meter on the model counts.
    """

    name: ClassVar[str]
    upper_bound: ClassVar[bool] = False
    """Whether the method uses the full prefill of the new prompt, and so is no edit one could make."""
    replaces_erratum: ClassVar[bool] = False
    """Whether the method itself takes out an earlier erratum of the field."""
    Parameters: ClassVar[type[Parameters]] = Parameters
    parameters: Any

    def __init__(self, parameters: Any = None) -> None:
        self.parameters = parameters if parameters is not None else self.Parameters()

    @abstractmethod
    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The edited prompt.

        Raises:
            UnsupportedError: the method cannot make this edit (another length, nothing to append, ...).
        """

    @abstractmethod
    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """How many tokens the method runs through the model, the decision token left out.

        Tokens of a pass through some layers only count by the share of layers.
        """


def make_method(name: str, **parameters: Any) -> EditMethod:
    """The registered method `name` with its parameters.

    Raises:
        UnknownNameError: there is no such method; with the nearest names.
        ValueError: it does not take these parameters.
    """
    kind = EDIT_METHODS.get(name)
    return kind(kind.Parameters(**parameters))


def chosen_method(method: str | EditMethod, parameters: Mapping[str, Any]) -> EditMethod:
    """A method, or the registered one of that name with its parameters.

    Raises:
        ConfigError: it does not take these parameters, or has its own already.
        UnknownNameError: there is no such method.
    """
    if isinstance(method, EditMethod):
        if parameters:
            raise ConfigError(f"The method {method.name} has its parameters already; give its name to choose others.")
        return method
    try:
        return make_method(method, **parameters)
    except ValueError as error:
        raise ConfigError(f"The method {method} does not take these parameters: {error}") from error
