"""What an agent is: turn after turn it learns what has changed, keeps a cache, and decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kvprobe.agents.conversation import CHUNK, Conversation, Ids
from kvprobe.composing.chunk import Chunk, precompile
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import Forward, clock, forward
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError
from kvprobe.registry import KINDS, Registry

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

AGENTS: Registry[type[Agent]] = Registry(KINDS["AGENTS"])


@dataclass(frozen=True, eq=False)
class Reply:
    """One turn's decision.

    Attributes:
        token_ids: the prompt as this agent holds it, the question included.
        logits: `[vocab]` behind it.
        answer: which of the two answers leads; it goes into the agent's history.
        receipt: all that was run in this turn: edits, what is new, and the decision token.
        seconds: from learning what changed to the decision, end to end.
    """

    token_ids: Ids
    logits: Tensor
    answer: int
    receipt: Receipt
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens run."""
        return self.receipt.tokens_appended + self.receipt.tokens_recomputed


@dataclass(frozen=True, eq=False)
class Turned:
    """What an agent makes of a turn: the prompt it holds, logits `[vocab]` behind it, and the cost."""

    token_ids: Ids
    logits: Tensor
    receipt: Receipt


class Parameters(BaseModel):
    """Base of all agents' parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Agent(ABC):
    """Base of all agents; one instance lives through one conversation.

    Args:
        subject: the model.
        conversation: its words.
        parameters: the agent's own.
        policy: the policy compiled apart from the conversation, for agents that reuse it; by default they compile it
            themselves, and `compiling` says what that cost.
    """

    name: ClassVar[str]
    uses_chunk: ClassVar[bool] = False
    """Whether the first turn reuses a policy compiled beforehand."""
    Parameters: ClassVar[type[Parameters]] = Parameters
    parameters: Any

    def __init__(
        self, subject: Subject, conversation: Conversation, parameters: Any = None, policy: Chunk | None = None
    ) -> None:
        self.subject = subject
        self.conversation = conversation
        self.parameters = parameters if parameters is not None else self.Parameters()
        self.state = dict.fromkeys(conversation.variables, 0)
        self.answers: list[int] = []
        self.policy = compiled_policy(subject, conversation) if self.uses_chunk and policy is None else policy
        self.compiling = self.policy.receipt if self.policy is not None else Receipt()

    def take_turn(self, changes: Sequence[str] = ()) -> Reply:
        """Learn that `changes` have gone to their other values, and decide.

        A turn that fails leaves the agent without a cache: its next turn begins anew, as the first did.

        Raises:
            ConfigError: there is no such variable, or a text in place of a list of names.
        """
        unknown = [changes] if isinstance(changes, str) else [name for name in changes if name not in self.state]
        if unknown:
            raise ConfigError(
                f"There is nothing called {unknown[0]!r} to change in this conversation; give a list of some of "
                f"{', '.join(self.state)}."
            )
        started = clock(self.subject)
        before = dict(self.state)
        for name in changes:
            self.state[name] = 1 - self.state[name]
        try:
            turned = self.turn(changes)
        except Exception:
            self.state = before
            self.forget()
            raise
        seconds = clock(self.subject) - started
        first, second = (float(turned.logits[token]) for token in self.conversation.answers)
        answer = int(second > first)
        self.answers.append(answer)
        return Reply(turned.token_ids, turned.logits, answer, turned.receipt, seconds)

    def forget(self) -> None:  # noqa: B027
        """Drop the running cache; agents that keep one define it."""

    @abstractmethod
    def turn(self, changes: Sequence[str]) -> Turned:
        """Decide under `self.state`, behind `self.answers`."""


def make_agent(
    name: str, subject: Subject, conversation: Conversation, policy: Chunk | None = None, **parameters: Any
) -> Agent:
    """The registered agent `name` at the beginning of a conversation.

    Raises:
        UnknownNameError: there is no such agent; with the nearest names.
        ValueError: it does not take these parameters.
    """
    kind = AGENTS.get(name)
    return kind(subject, conversation, kind.Parameters(**parameters), policy)


def compiled_policy(subject: Subject, conversation: Conversation) -> Chunk:
    """The first policy as a chunk of its own, compiled behind the tokenizer's beginning of a text if it has one."""
    ids = tuple(token for name, tokens in conversation.head if name in CHUNK for token in tokens)
    return precompile(subject, ids, "none" if subject.tokenizer.bos_token_id is None else "bos")


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def run_behind_prefix(subject: Subject, held: Ids, cache: KVCache | None, ids: Ids) -> Forward:
    """Run what `ids` have beyond the longest prefix that `cache` (of the tokens `held`) shares with them.

    The last token is always run, for its logits.
    """
    kept = 0 if cache is None else min(common_prefix(held, ids), len(ids) - 1)
    return forward(subject, ids[kept:], None if cache is None or not kept else cache.take(slice(0, kept)))
