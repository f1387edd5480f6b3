"""The two closed forms: a new value for one key exactly, or for several keys as well as the text allows.

Both change a linear map W so that keys `k` get new values while `tr(dW C dW^T)` stays least: how much W makes of other
text, whose second moment is C, changes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact_update(moment: Tensor, key: Tensor, change: Tensor) -> Tensor:
    """The `dW` `[hidden, unit]` of least effect on text with `dW k = change`.

    `dW = change (C^-1 k)^T / (k^T C^-1 k)`: Meng et al., "Locating and Editing Factual Associations in GPT" (2022).

    Args:
        moment: C, positive definite, `[unit, unit]`.
        key: k, `[unit]`.
        change: of the value, `[hidden]`.
    """
    solved = torch.linalg.solve(moment, key)
    return torch.outer(change, solved) / (key @ solved)


def spread_update(moment: Tensor, keys: Tensor, changes: Tensor, weight: float) -> Tensor:
    """The `dW` `[hidden, unit]` that makes `weight * tr(dW C dW^T) + |dW K - changes|^2` least.

    `dW = R K^T (weight C + K K^T)^-1`: Meng et al., "Mass-Editing Memory in a Transformer" (2023).

    Args:
        moment: C, `[unit, unit]`.
        keys: K, `[unit, request]`.
        changes: R, of the values, `[hidden, request]`.
        weight: of the text against the requests; towards 0 the requests are met exactly.
    """
    return torch.linalg.solve(weight * moment + keys @ keys.T, keys @ changes.T).T
