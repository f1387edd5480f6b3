"""Reading a decision from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Readout:
    """The decision between two answers.

    Attributes:
        margin: logit of the donor's answer minus logit of the base's answer.
        probability_base: probability of the base's answer over the whole vocabulary.
        probability_donor: probability of the donor's answer over the whole vocabulary.
        mass: their sum: near 0 the model was saying something else altogether.
        argmax: the most likely token id.
    """

    margin: float
    probability_base: float
    probability_donor: float
    mass: float
    argmax: int


def read(logits: Tensor, base_answer_id: int, donor_answer_id: int) -> Readout:
    """The decision in `logits` `[vocab]`."""
    return read_rows(logits[None], base_answer_id, donor_answer_id)[0]


def read_rows(logits: Tensor, base_answer_id: int, donor_answer_id: int) -> list[Readout]:
    """The decision in each row of `logits` `[row, vocab]`."""
    answers = [base_answer_id, donor_answer_id]
    pair = logits[:, answers].double()
    chance = (pair - torch.logsumexp(logits.double(), dim=-1, keepdim=True)).exp()
    return [
        Readout(donor - base, p_base, p_donor, p_base + p_donor, best)
        for (base, donor), (p_base, p_donor), best in zip(
            pair.tolist(), chance.tolist(), logits.argmax(-1).tolist(), strict=True
        )
    ]


def cosine(logits: Tensor, reference: Tensor) -> float:
    """Cosine of two logit vectors `[vocab]`."""
    return float(torch.cosine_similarity(logits.double(), reference.double(), dim=0))
