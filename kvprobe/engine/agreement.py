"""How far one next-token distribution is from another, in numbers that tell good caches from bad ones (critique G8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.engine.readout import cosine


@dataclass(frozen=True)
class Agreement:
    """Next-token logits against those of a reference.

    Attributes:
        kl: Kullback-Leibler divergence of the reference from them, in nats: what is lost by using them.
        js: Jensen-Shannon divergence, 0 to log 2, in nats.
        total_variation: half the sum of absolute differences of probability, 0 to 1.
        top_overlap: share of the reference's top 10 tokens that are in their top 10.
        same_argmax: whether the most likely token is the same.
        cosine: of the logit vectors. High for almost any cache; it means something only beside that of a wrong one.
    """

    kl: float
    js: float
    total_variation: float
    top_overlap: float
    same_argmax: bool
    cosine: float


def agreement(logits: Tensor, reference: Tensor, top: int = 10) -> Agreement:
    """Compare `logits` with `reference`, both `[vocab]`, in float64.

    Args:
        logits: under the cache in question.
        reference: under the cache that is right.
        top: how many of the most likely tokens `top_overlap` counts.
    """
    mine, ought = (torch.log_softmax(given.double().cpu(), -1) for given in (logits, reference))
    middle = torch.logsumexp(torch.stack([mine, ought]), 0) - torch.log(torch.tensor(2.0, dtype=torch.float64))
    best = [set(torch.topk(given, min(top, len(given))).indices.tolist()) for given in (mine, ought)]
    return Agreement(
        kl=_divergence(ought, mine),
        js=(_divergence(mine, middle) + _divergence(ought, middle)) / 2,
        total_variation=float((mine.exp() - ought.exp()).abs().sum() / 2),
        top_overlap=len(best[0] & best[1]) / len(best[1]),
        same_argmax=bool(mine.argmax() == ought.argmax()),
        cosine=cosine(logits.cpu(), reference.cpu()),
    )


def _divergence(of: Tensor, from_: Tensor) -> float:
    # Rounding can make the divergence of almost equal distributions a little negative.
    return max(0.0, float((of.exp() * (of - from_)).sum()))
