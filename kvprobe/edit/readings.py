"""What an editable context tells: the cost of an edit, a decision, a text, and the seam an edit leaves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.edit.base import CachedPrompt
from kvprobe.engine.forward import Forward, forward
from kvprobe.engine.generation import Generation
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError
from kvprobe.models.subject import Subject
from kvprobe.tasks.answers import spellings
from kvprobe.viewing import Viewable


@dataclass(frozen=True)
class Cost(Viewable):
    """What one edit cost.

    Attributes:
        method: its name.
        receipt: tokens, FLOPs and seconds, from what was really run.
        prompt_tokens: length of the edited prompt.
    """

    method: str
    receipt: Receipt
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens run through the model; those of a pass through some layers count by the share of layers."""
        return self.receipt.tokens_appended + self.receipt.tokens_recomputed

    @property
    def fraction(self) -> float:
        """Tokens run, as a share of the edited prompt."""
        return self.tokens / self.prompt_tokens


@dataclass(frozen=True)
class Decision(Viewable):
    """A choice between answers.

    Attributes:
        answer: the most likely of them.
        log_probabilities: of each whole answer, over everything the model might say, in nats.
        next_token: what the model would really say next, whether an answer or not.
    """

    answer: str
    log_probabilities: Mapping[str, float]
    next_token: str

    @property
    def margin(self) -> float:
        """How far the answer leads the runner-up, in nats; for answers of one token the difference of logits."""
        first, second = sorted(self.log_probabilities.values(), reverse=True)[:2]
        return first - second

    @property
    def probabilities(self) -> dict[str, float]:
        """Of each whole answer; they add up to 1 only if the model says nothing else."""
        return {answer: float(torch.tensor(value).exp()) for answer, value in self.log_probabilities.items()}


@dataclass(frozen=True)
class Written:
    """Generated text.

    Attributes:
        text: without the stop sequence.
        token_ids: of the whole, the stop sequence included.
        finished: whether a stop sequence came before the limit.
    """

    text: str
    token_ids: tuple[int, ...]
    finished: bool

    @classmethod
    def of(cls, made: Generation, stop: Sequence[str], tokenizer: Any) -> Written:
        """The text before the end token or the stop text, which may begin within a token."""
        text, finished = str(tokenizer.decode(made.token_ids, clean_up_tokenization_spaces=False)), not made.censored
        found = [text.find(end) for end in stop if end and end in text]
        if made.stop_length and found:
            return cls(text[: min(found)], made.token_ids, finished)
        kept = made.token_ids[: len(made.token_ids) - (max(1, made.stop_length) if finished else 0)]
        return cls(str(tokenizer.decode(kept, clean_up_tokenization_spaces=False)), made.token_ids, finished)


@dataclass(frozen=True)
class Seam(Viewable):
    """How a decision on the edited cache differs from one on a cache that was prefilled at once.

    Attributes:
        edited: on the cache as it is.
        reprefilled: on the full prefill.
        total_variation: between the two distributions of the next token, 0 to 1.
    """

    edited: Decision
    reprefilled: Decision
    total_variation: float

    @property
    def same_answer(self) -> bool:
        """Whether both decide alike."""
        return self.edited.answer == self.reprefilled.answer

    @property
    def shifts(self) -> dict[str, float]:
        """By answer, its log-probability on the edited cache less that on the full prefill, in nats."""
        full = self.reprefilled.log_probabilities
        return {answer: value - full[answer] for answer, value in self.edited.log_probabilities.items()}


def decide_between(subject: Subject, prompt: CachedPrompt, answers: Sequence[str]) -> tuple[Decision, Tensor]:
    """The decision of a prompt, and log-probabilities `[vocab]` of its next token.

    The spellings of one answer, with a blank before it and without, are added up.

    Raises:
        ConfigError: fewer than two answers, or one begins as another does and so they cannot be told apart.
    """
    tokenizer = subject.tokenizer
    tokens = {answer: spellings(answer, prompt.token_ids, tokenizer) if answer else () for answer in answers}
    _check_answers(answers, tokens)
    first = prompt.decide(subject)
    start = torch.log_softmax(first.logits.double(), -1)
    scores = {
        answer: float(torch.logsumexp(torch.stack([_score(subject, first, start, ids) for ids in ways]), 0))
        for answer, ways in tokens.items()
    }
    likely = int(first.logits.argmax())
    return Decision(max(scores, key=scores.__getitem__), scores, tokenizer.decode([likely])), start


def _score(subject: Subject, first: Forward, start: Tensor, ids: Sequence[int]) -> Tensor:
    """Log-probability of tokens behind a prompt, in nats."""
    score, cache = start[ids[0]], first.cache
    for said, following in itertools.pairwise(ids):
        result = forward(subject, [said], cache)
        cache, score = result.cache, score + torch.log_softmax(result.logits.double(), -1)[following]
    return score


def _check_answers(answers: Sequence[str], tokens: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
    if isinstance(answers, str) or len(tokens) < 2 or not all(tokens.values()):
        raise ConfigError("A decision needs at least two different answers, none of them empty.")
    for (one, mine), (other, theirs) in itertools.permutations(tokens.items(), 2):
        if any(longer[: len(shorter)] == shorter for shorter in mine for longer in theirs):
            raise ConfigError(f"The answers {one!r} and {other!r} begin alike; choose answers that can be told apart.")
