"""FLOPs and bytes that a piece of work cannot do without: what the machine's rates turn into its shortest time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvprobe.engine.forward import flops
from kvprobe.engine.masks import plan_masks

if TYPE_CHECKING:
    from benchmarks.case import Case
    from benchmarks.machine import Rates
    from kvprobe.models.subject import Subject


@dataclass(frozen=True)
class Work:
    """FLOPs, and bytes read or written."""

    flops: float
    nbytes: float

    def times(self, count: int) -> Work:
        """This work done `count` times."""
        return Work(self.flops * count, self.nbytes * count)

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.nbytes + other.nbytes)

    def shortest(self, rates: Rates) -> float:
        """Seconds at the measured rates of the machine."""
        return max(self.flops / rates.flops, self.nbytes / rates.memory)

    def bound(self, rates: Rates) -> str:
        """Which rate sets the shortest time: `compute` or `memory`."""
        return "compute" if self.flops / rates.flops >= self.nbytes / rates.memory else "memory"


def weights(subject: Subject) -> float:
    """Bytes of the weights that a pass multiplies with: an embedding that is not tied is looked up, not read."""
    embedding, head = subject.model.get_input_embeddings().weight, subject.model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    everything = sum(tensor.numel() * tensor.element_size() for tensor in subject.model.parameters())
    return float(everything - (0 if tied else embedding.numel() * embedding.element_size()))


def prompt_work(case: Case) -> Work:
    """One pass over a whole prompt."""
    return tokens_work(case, case.length) + Work(0, weights(case.subject))


def tokens_work(case: Case, count: int) -> Work:
    """The last `count` tokens run on all entries before them, with logits at the last; weights not counted."""
    places = torch.arange(case.length)
    causal = torch.ones(count, case.length, dtype=torch.bool).tril(case.length - count)
    plan = plan_masks(case.subject, places[-count:], places, causal)
    return Work(flops(case.subject, count, plan.attended, case.length), float(case.base.nbytes))


def shared_work(case: Case, rows: int, tokens: int, entries: float) -> Work:
    """`rows` runs of the last `tokens` tokens that read weights and shared entries once.

    `entries` is how many entries (of all layers) each row has of its own.
    """
    one = tokens_work(case, tokens)
    per_entry = case.base.nbytes / case.length
    return Work(rows * one.flops, weights(case.subject) + one.nbytes + rows * entries * per_entry)
