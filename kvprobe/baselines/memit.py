"""MEMIT: several MLPs share the change that several requests need (protocol 5.8, critique ED10).

After Meng et al., "Mass-Editing Memory in a Transformer" (2023): each request's wanted residual stream after the last
edited layer is found by optimisation; then, layer by layer, every MLP takes an equal share of what is still missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from kvprobe.baselines import base
from kvprobe.baselines.base import WEIGHT_EDITS, Background, WeightChange, WeightEdit, WeightRequest, need, restored
from kvprobe.baselines.closed_forms import spread_update
from kvprobe.baselines.mlp import (
    after_norm,
    decoder_layer,
    down_projection,
    layer_at,
    logits_at,
    recorded,
    shifted,
)
from kvprobe.baselines.second_moment import second_moments, with_ridge
from kvprobe.baselines.values import FoundValue, ValueSearch, find_value

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

# Newton steps through a norm, and the smallest singular value of its slope that is inverted, of the largest.
_NORM_STEPS = 4
_SMALLEST = 1e-3


@WEIGHT_EDITS.register("memit")
class Memit(WeightEdit):
    """Spread what the requests need over the MLPs of several layers; any number of requests."""

    name: ClassVar[str] = "memit"

    class Parameters(base.Parameters):
        """Which layers, and how hard the text is held on to."""

        first_depth: float = Field(0.0, ge=0, le=1, description="of the first edited layer")
        last_depth: float = Field(0.4, ge=0, le=1, description="of the last edited layer")
        ridge: float = Field(0.01, gt=0, description="added to the second moment's diagonal, in shares of its mean")
        weight: float = Field(0.1, gt=0, description="of the text's second moment against the requests' keys")
        search: ValueSearch = ValueSearch()

        @model_validator(mode="after")
        def _in_order(self) -> Memit.Parameters:
            if self.first_depth > self.last_depth:
                raise ValueError("first_depth must not lie behind last_depth")
            return self

    def layers(self, subject: Subject) -> list[int]:
        """The edited layers, first to last."""
        first, last = (layer_at(subject, depth) for depth in (self.parameters.first_depth, self.parameters.last_depth))
        return list(range(first, last + 1))

    def prepare(self, subject: Subject, background: Background) -> None:
        """The second moments of the edited layers."""
        second_moments(subject, self.layers(subject), background)

    @contextmanager
    def applied(
        self, subject: Subject, requests: Sequence[WeightRequest], background: Background
    ) -> Iterator[WeightChange]:
        """The model with all requests' changes."""
        need(requests, "MEMIT")
        layers = self.layers(subject)
        moments = second_moments(subject, layers, background)
        weights = {layer: down_projection(subject, layer).weight for layer in layers}
        with restored(list(weights.values())):
            found = [find_value(subject, request, layers[-1], self.parameters.search) for request in requests]
            wanted = [
                _stream(subject, request, layers[-1], value) for request, value in zip(requests, found, strict=True)
            ]
            for layer in layers:
                keys, changes = _shares(subject, requests, wanted, layer, layers[-1])
                moment = with_ridge(moments[layer], self.parameters.ridge)
                update = spread_update(moment, keys, changes, self.parameters.weight)
                with torch.no_grad():
                    weights[layer] += update.to(weights[layer])
            yield WeightChange(min(value.probability for value in found), sum(value.steps for value in found))


def _stream(subject: Subject, request: WeightRequest, layer: int, value: FoundValue) -> Tensor:
    """Residual stream `[hidden]` after a layer at the subject token, with the change found."""
    change = value.change.to(subject.device)
    with (
        recorded([decoder_layer(subject, layer)]) as (record,),
        shifted(down_projection(subject, layer), request.position, change),
    ):
        logits_at(subject, [request.token_ids], [(0, request.position)])
    return record["output"][0, request.position]


def _shares(
    subject: Subject, requests: Sequence[WeightRequest], wanted: Sequence[Tensor], layer: int, last: int
) -> tuple[Tensor, Tensor]:
    """Keys `[unit, request]` of a layer, and its share `[hidden, request]` of what its outputs still lack."""
    keys, changes = [], []
    for request, stream in zip(requests, wanted, strict=True):
        with recorded([down_projection(subject, layer), decoder_layer(subject, last)]) as (mlp, end):
            logits_at(subject, [request.token_ids], [(0, request.position)])
        lacking = (stream - end["output"][0, request.position]) / (last - layer + 1)
        output = mlp["output"][0, request.position]
        keys.append(mlp["input"][0, request.position])
        changes.append(before_norm(after_norm(subject, layer), output, lacking))
    return tuple(torch.stack(part, 1).to("cpu", torch.float64) for part in (keys, changes))  # type: ignore[return-value]


def before_norm(norm: Any, output: Tensor, change: Tensor) -> Tensor:
    """The change of an MLP's output that changes the residual stream by `change` `[hidden]`.

    They are the same where no norm lies between. A norm fixes the length of what passes it, so the wanted change is
    reached as nearly as its length allows, by Newton's method.
    """
    if norm is None:
        return change
    wanted, place = norm(output) + change, output
    for _ in range(_NORM_STEPS):
        slope = torch.func.jacrev(norm)(place)
        place = place + torch.linalg.pinv(slope.double(), rtol=_SMALLEST).to(place) @ (wanted - norm(place))
    return place - output
