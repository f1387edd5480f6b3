"""Directions of the residual stream: found in examples, and steps along them (protocol 4.2, critique CI4, CI5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from kvprobe.probes.kit.decoding import channel_spread

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Array = NDArray[np.float64]


def unit(vectors: Array) -> Array:
    """Vectors `[..., hidden]` at length 1; one of length 0 stays as it is."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12))


def difference_of_means(states: Array, holds: NDArray[np.bool_]) -> Array:
    """From the mean of the states `[row, hidden]` where a concept does not hold to the mean of those where it does."""
    return unit(states[holds].mean(axis=0) - states[~holds].mean(axis=0))


def logistic_direction(states: Array, holds: NDArray[np.bool_]) -> Array:
    """Normal of the plane by which logistic regression of standardised states tells the two apart.

    It is the direction in which the classes are best *told apart*, which need not be the one in which they differ: a
    channel counts for more the less it varies otherwise (Haufe et al. 2014).
    """
    spread = channel_spread(states)
    model = LogisticRegression(max_iter=1000).fit((states - states.mean(axis=0)) / spread, holds)
    return unit(model.coef_[0] / spread)


def leading_component(states: Array) -> Array:
    """The direction in which the states vary most, whatever it stands for."""
    return np.asarray(np.linalg.svd(states - states.mean(axis=0), full_matrices=False)[2][0])


def along(difference: Array, direction: Array) -> Array:
    """The part of a difference `[position, hidden]` that lies along a direction `[position, hidden]` of length 1."""
    return np.asarray((difference * direction).sum(axis=-1, keepdims=True) * direction)


def matched_step(difference: Array, direction: Array, lengths: Array) -> Array:
    """A step along `direction`, towards the donor, of given lengths `[position]` (critique CI4)."""
    sign = np.where((difference * direction).sum(axis=-1, keepdims=True) >= 0, 1.0, -1.0)
    return np.asarray(sign * lengths[:, None] * direction)


def set_coordinate(states: Array, direction: Array, value: Array) -> Array:
    """What must be added to `states` `[position, hidden]` for their coordinates along `direction` to be `value`."""
    return np.asarray((value - (states * direction).sum(axis=-1))[:, None] * direction)


@dataclass(frozen=True, eq=False)
class Interchange:
    """One pair as the search sees it: a prompt, and what another prompt has at some of its positions.

    Attributes:
        token_ids: of the prompt.
        positions: where it is changed.
        kinds: for each position, which of the directions acts there.
        difference: `[position, hidden]` the other prompt's residual stream minus this one's.
        answers: the prompt's own answer and the other's, token ids.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    kinds: Sequence[int]
    difference: Tensor
    answers: tuple[int, int]


def search_directions(
    subject: Subject,
    layer: int,
    examples: Sequence[Interchange],
    initial: Array,
    *,
    steps: int,
    batch_size: int,
    rate: float,
    seed: int,
) -> Array:
    """Directions along which an interchange moves decisions most, found by gradient descent.

    Distributed alignment search with a subspace of one dimension (Geiger et al. 2024) for each kind of position: the
    coordinate along the direction comes from the other prompt, the rest stays, and the loss is the negative
    log-probability, between the two answers, of the other prompt's. The weights of the model are never changed.

    Args:
        subject: the model.
        layer: block after which the residual stream is changed.
        examples: to train on.
        initial: `[kind, hidden]` where to start.
        steps: of Adam.
        batch_size: examples in one step.
        rate: learning rate of the directions, which have length 1.
        seed: of the order of the examples.

    Returns:
        `[kind, hidden]` directions of length 1.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor(initial, dtype=torch.float32)
    # A direction of length 0, where two classes were equal, has no gradient to begin with.
    start = torch.where(start.any(dim=-1, keepdim=True), start, torch.randn(start.shape, generator=generator))
    directions = start.to(subject.device).requires_grad_()
    optimiser = torch.optim.Adam([directions], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    order: list[int] = []
    for _ in range(steps):
        if len(order) < batch_size:
            order += torch.randperm(len(examples), generator=generator).tolist()
        batch, order = [examples[number] for number in order[:batch_size]], order[batch_size:]
        optimiser.zero_grad()
        margins = interchanged_margins(subject, layer, batch, directions)
        torch.nn.functional.softplus(-margins).mean().backward()
        optimiser.step()
        schedule.step()
    return unit(directions.detach().cpu().double().numpy())


def interchanged_margins(subject: Subject, layer: int, batch: Sequence[Interchange], directions: Tensor) -> Tensor:
    """Margins `[example]` (logits, towards the other prompt's answer) with the coordinate along the directions changed.

    Gradients flow to `directions` `[kind, hidden]`. Prompts are padded at their ends, which no earlier token sees.
    """
    longest = max(len(example.token_ids) for example in batch)
    ids = torch.tensor([[*example.token_ids, *[0] * (longest - len(example.token_ids))] for example in batch])
    ends = torch.tensor([len(example.token_ids) - 1 for example in batch], device=subject.device)
    unit_directions = directions / directions.norm(dim=-1, keepdim=True)

    def change(states: Tensor) -> Tensor:
        changed = states.clone()
        for row, example in enumerate(batch):
            direction = unit_directions[list(example.kinds)]
            difference = example.difference.to(direction)
            step = (difference * direction).sum(dim=-1, keepdim=True) * direction
            changed[row, list(example.positions)] = states[row, list(example.positions)] + step.to(states.dtype)
        return changed

    subject.check_prompt(longest)
    with torch.enable_grad(), _changed_after(subject, layer, change):
        output = subject.model(input_ids=ids.to(subject.device), use_cache=False, logits_to_keep=ends)
    rows = torch.arange(len(batch), device=subject.device)
    logits = output.logits[rows, rows].float()
    own, other = (torch.tensor([example.answers[n] for example in batch], device=subject.device) for n in (0, 1))
    return logits[rows, other] - logits[rows, own]


@contextmanager
def _changed_after(subject: Subject, layer: int, change: Any) -> Iterator[None]:
    """The output of one decoder layer passes through `change`."""
    block = subject.architecture.decoder_layers(subject.model)[layer]

    def hook(_module: Any, _arguments: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
