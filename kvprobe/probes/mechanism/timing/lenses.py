"""Lenses: what the model would answer if it stopped after some block (protocol 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from kvprobe.engine.components import ActivationEdit, components, set_to
from kvprobe.probes.kit.decoding import Array, residual_hooks

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def lens_margins(subject: Subject, states: Array, answers: tuple[int, int]) -> NDArray[np.float64]:
    """Margins `[row]` (logits, second answer minus first) of residual streams `[row, hidden]` put where the top one is.

    The model itself applies its final norm, its unembedding and its soft-capping, each once. Nothing below the top
    of the residual stream matters, so one token is run, without its prompt.
    """
    top = residual_hooks(subject.layers)[-1]
    rows = [[ActivationEdit(top, set_to(torch.from_numpy(state)))] for state in states]
    logits = components(subject).run([answers[0]], rows).double()
    return np.asarray((logits[:, answers[1]] - logits[:, answers[0]]).numpy())


def tuned_lens(states: Array, penalty: float = 1.0) -> Sequence[Ridge]:
    """For each layer but the top an affine map from it to the top, by (ridge) least squares.

    A tuned lens (Belrose et al. 2023), fitted by least squares instead of training on the model's loss.

    Args:
        states: `[token, layer, hidden]` of tokens of any kind.
        penalty: of the map's weights, which matters only where there are fewer tokens than channels.
    """
    return [Ridge(alpha=penalty).fit(states[:, layer], states[:, -1]) for layer in range(states.shape[1] - 1)]


def through(lens: Sequence[Ridge], states: Array) -> Array:
    """`[row, layer, hidden]` each layer mapped to the top; the top itself is unchanged."""
    below = [map_.predict(states[:, layer]) for layer, map_ in enumerate(lens)]
    return np.stack([*below, states[:, -1]], axis=1).astype(np.float32)
