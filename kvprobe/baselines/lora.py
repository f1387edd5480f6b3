"""LoRA: a low-rank adapter trained on the request, with a retain set (protocol 5.8, critique ED10).

The adapter is `peft`'s. It can be left in force for everybody, as merged weights would be, or serve its own request
alone (`WeightChange.suspended` answers the others without it).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvprobe.baselines import base
from kvprobe.baselines.base import WEIGHT_EDITS, Background, WeightChange, WeightEdit, WeightRequest, need
from kvprobe.baselines.mlp import decisions, logits_at
from kvprobe.errors import NumericsError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@WEIGHT_EDITS.register("lora")
class Lora(WeightEdit):
    """Train an adapter of the attention's queries and values and of the MLP's output."""

    name: ClassVar[str] = "lora"

    class Parameters(base.Parameters):
        """Of the adapter and of its training."""

        rank: int = Field(8, ge=1)
        alpha: float = Field(16.0, gt=0, description="the update is scaled by alpha / rank")
        modules: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
        steps: int = Field(30, ge=1, description="most steps of Adam")
        learning_rate: float = Field(1e-2, gt=0)
        retain: float = Field(1.0, ge=0, description="weight of the KL on the retain set")
        retain_batch: int = Field(2, ge=1, description="prompts of the retain set in each step")
        enough: float = Field(0.95, gt=0, le=1, description="probability of every target at which training ends")
        seed: int = 0

    @contextmanager
    def applied(
        self, subject: Subject, requests: Sequence[WeightRequest], background: Background
    ) -> Iterator[WeightChange]:
        """The model with the trained adapter, which no base weight is part of."""
        need(requests, "LoRA")
        kept = decisions(subject, background.retain).log_softmax(-1) if background.retain else None
        with self._adapter(subject) as adapted:
            probability, steps = self._train(subject, requests, background.retain, kept)
            yield WeightChange(probability, steps, adapted.disable_adapter)

    @contextmanager
    def _adapter(self, subject: Subject) -> Iterator[Any]:
        import peft

        model, options = subject.model, self.parameters
        attributes = dict(vars(model))
        config = peft.LoraConfig(
            r=options.rank, lora_alpha=options.alpha, lora_dropout=0.0, target_modules=list(options.modules)
        )
        with torch.random.fork_rng(), warnings.catch_warnings():
            # peft reads an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            torch.manual_seed(options.seed)
            adapted = peft.get_peft_model(model, config)
        adapted.eval()
        try:
            yield adapted
        finally:
            adapted.unload()
            # peft leaves its configuration on the model, where a later adapter would find it.
            for name in vars(model).keys() - attributes.keys():
                delattr(model, name)

    def _train(
        self,
        subject: Subject,
        requests: Sequence[WeightRequest],
        retain: Sequence[tuple[int, ...]],
        kept: Tensor | None,
    ) -> tuple[float, int]:
        """Train the adapter that is in the model; the smallest probability of a target, and the steps made."""
        options = self.parameters
        trainable = [weight for weight in subject.model.parameters() if weight.requires_grad]
        optimiser = torch.optim.Adam(trainable, lr=options.learning_rate)
        answers = [request.answered for request in requests]
        for step in range(options.steps + 1):
            turn = [(step * options.retain_batch + i) % len(retain) for i in range(options.retain_batch) if retain]
            last = [(len(answers) + row, len(retain[index]) - 1) for row, index in enumerate(turn)]
            reads = [*_answer_places(requests), *last]
            logits = logits_at(subject, [*answers, *(retain[index] for index in turn)], reads, gradients=True)
            chances = _log_probabilities(logits, requests)
            probability = float(chances.detach().min().exp())
            if probability >= options.enough or step == options.steps:
                break
            loss = -chances.mean()
            if kept is not None:
                now = logits[len(reads) - len(last) :].log_softmax(-1)
                divergence = torch.nn.functional.kl_div(now, kept[turn], reduction="batchmean", log_target=True)
                loss = loss + options.retain * divergence
            if not bool(torch.isfinite(loss)):
                raise NumericsError(f"Training the adapter of {subject.name} gives a loss of {float(loss)}.")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return probability, step


def _answer_places(requests: Sequence[WeightRequest]) -> list[tuple[int, int]]:
    """`(row, position)` at which each token of each answer is predicted."""
    return [
        (row, len(request.token_ids) - 1 + place)
        for row, request in enumerate(requests)
        for place in range(len(request.target_ids))
    ]


def _log_probabilities(logits: Tensor, requests: Sequence[WeightRequest]) -> Tensor:
    """`[request]` of each whole answer, from logits that begin with those of all answers' tokens."""
    wanted = torch.tensor([token for request in requests for token in request.target_ids], device=logits.device)
    each = logits[: len(wanted)].log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return torch.stack([part.sum() for part in each.split([len(request.target_ids) for request in requests])])
