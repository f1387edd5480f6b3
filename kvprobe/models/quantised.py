"""Models with weights in 8 or 4 bits, through torchao (the extra `quantised`)."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from kvprobe.errors import UnsupportedError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Weights = Literal["int8", "int4"]
GROUP = 32
"""Weights of one row that share a scale in 4 bits."""


def quantised(subject: Subject, weights: Weights = "int8") -> Subject:
    """A copy of `subject` whose linear layers keep their weights in fewer bits; activations stay as they are.

    Args:
        subject: the model; it is left as it is.
        weights: `int8`, one scale per output channel, or `int4`, one per group of 32.

    Raises:
        UnsupportedError: torchao is not installed, the model has mixtures of experts, whose weights are no linear
            layers, or a layer is not a multiple of the group wide.
    """
    if subject.architecture.has_experts:
        raise UnsupportedError(
            f"{subject.name} has mixtures of experts, whose weights torchao would leave as they are."
        )
    try:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup
    except ImportError as error:
        raise UnsupportedError("Quantised weights need torchao: pip install 'kvprobe[quantised]'.") from error
    import torch

    if weights == "int4":
        _check_groups(subject)
    model = copy.deepcopy(subject.model)
    rule: Any = Int8WeightOnlyConfig()
    if weights == "int4":
        rule = IntxWeightOnlyConfig(weight_dtype=getattr(torch, weights), granularity=PerGroup(GROUP))
    quantize_(model, rule)
    model.requires_grad_(False)
    digest = hashlib.sha256(f"{subject.identity.weights_sha256} {weights} {GROUP}".encode()).hexdigest()
    identity = replace(
        subject.identity,
        name=f"{subject.name}-{weights}",
        weights_sha256=digest,
        dtype=f"{subject.identity.dtype}, {weights} weights",
    )
    return replace(subject, name=identity.name, model=model, identity=identity)


def _check_groups(subject: Subject) -> None:
    import torch

    for name, module in subject.model.named_modules():
        if isinstance(module, torch.nn.Linear) and module.in_features % GROUP:
            raise UnsupportedError(f"{name} of {subject.name} is {module.in_features} wide, no multiple of {GROUP}.")
