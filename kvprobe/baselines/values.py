"""What an MLP's output at the subject token must become for the target answer: found by optimisation (ROME's v*)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kvprobe.baselines.base import WeightRequest
from kvprobe.baselines.mlp import after_norm, decoder_layer, down_projection, logits_at, recorded, shifted
from kvprobe.errors import NumericsError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


class ValueSearch(BaseModel):
    """How the value is searched for.

    The scale is the residual stream after the layer, for that is what the change has to turn; where a norm lies between
    (Gemma) it is the MLP's own output.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(25, ge=1, description="most steps of Adam")
    learning_rate: float = Field(0.6, gt=0, description="of Adam, in root mean squares of the scale")
    essence: float = Field(0.0625, ge=0, description="weight of the KL of what follows the subject token")
    decay: float = Field(0.005, ge=0, description="weight of the change's square over the scale's")
    largest: float = Field(3.0, gt=0, description="largest norm of the change, in norms of the scale")
    enough: float = Field(0.9, gt=0, le=1, description="probability of the target at which the search ends")


@dataclass(frozen=True, eq=False)
class FoundValue:
    """A key and the change of its value.

    Attributes:
        key: input of the down-projection at the subject token, float64 `[unit]`.
        change: of its output, float64 `[hidden]`.
        probability: of the target answer with the change in place.
        steps: made.
    """

    key: Tensor
    change: Tensor
    probability: float
    steps: int


def find_value(subject: Subject, request: WeightRequest, layer: int, search: ValueSearch) -> FoundValue:
    """The change of the MLP's output at the subject token that brings the target answer about.

    The loss is the target's cross-entropy, plus the KL of the next-token distribution at the subject token itself from
    what it was (its essence: what the token is must stay), plus the size of the change.

    Raises:
        NumericsError: the loss is not finite.
    """
    module = down_projection(subject, layer)
    start, position = len(request.token_ids) - 1, request.position
    reads = [(0, position), *((0, start + place) for place in range(len(request.target_ids)))]
    with recorded([module, decoder_layer(subject, layer)]) as (mlp, stream):
        before = logits_at(subject, [request.answered], reads)[0].log_softmax(-1)
    key = mlp["input"][0, position].to("cpu", torch.float64)
    scaled_by = stream if after_norm(subject, layer) is None else mlp
    size = scaled_by["output"][0, position].float().norm()
    scale = size / mlp["output"].shape[-1] ** 0.5
    step = torch.zeros_like(mlp["output"][0, position], dtype=torch.float32, requires_grad=True)
    optimiser = torch.optim.Adam([step], lr=search.learning_rate)
    best, best_probability, steps = torch.zeros_like(step), -1.0, 0
    for number in range(search.steps + 1):
        change = scale * step
        with shifted(module, position, change):
            logits = logits_at(subject, [request.answered], reads, gradients=True)
        answer = _log_probability(logits[1:], request.target_ids)
        probability = float(answer.detach().exp())
        if probability > best_probability:
            best, best_probability, steps = change.detach().clone(), probability, number
        if probability >= search.enough or number == search.steps:
            break
        essence = torch.nn.functional.kl_div(logits[0].log_softmax(-1), before, reduction="sum", log_target=True)
        loss = -answer + search.essence * essence + search.decay * (change / size).square().sum()
        if not bool(torch.isfinite(loss)):
            raise NumericsError(f"The search for a value in {subject.name} gives a loss of {float(loss)}.")
        (gradient,) = torch.autograd.grad(loss, step)
        step.grad = gradient
        optimiser.step()
        _clip(step, float(search.largest * size / scale))
    return FoundValue(key, best.to("cpu", torch.float64), best_probability, steps)


def _log_probability(logits: Tensor, target_ids: tuple[int, ...]) -> Tensor:
    """Of the whole answer, from logits `[answer token, vocab]`."""
    wanted = torch.tensor(target_ids, device=logits.device)
    return logits.log_softmax(-1).gather(1, wanted[:, None]).sum()


def _clip(step: Tensor, largest: float) -> None:
    with torch.no_grad():
        step *= min(1.0, largest / max(float(step.norm()), 1e-12))
