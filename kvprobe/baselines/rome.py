"""ROME: a rank-one change of one MLP, at the key of the subject token (protocol 5.8, critique ED10).

After Meng et al., "Locating and Editing Factual Associations in GPT" (2022). Here the subject is the field's value, so
the key is the MLP's input at the value's last token in the request itself; the paper's source takes the template's last
token, which all requests share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from kvprobe.baselines import base
from kvprobe.baselines.base import WEIGHT_EDITS, Background, WeightChange, WeightEdit, WeightRequest, need, restored
from kvprobe.baselines.closed_forms import exact_update
from kvprobe.baselines.mlp import down_projection, layer_at
from kvprobe.baselines.second_moment import second_moments, with_ridge
from kvprobe.baselines.values import ValueSearch, find_value

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@WEIGHT_EDITS.register("rome")
class Rome(WeightEdit):
    """Rewrite what one MLP makes of the subject token; one request at a time."""

    name: ClassVar[str] = "rome"

    class Parameters(base.Parameters):
        """Where, and how the value is found."""

        depth: float = Field(0.2, ge=0, le=1, description="of the edited layer: 0 the first, 1 the last")
        ridge: float = Field(0.01, gt=0, description="added to the second moment's diagonal, in shares of its mean")
        search: ValueSearch = ValueSearch()

    def prepare(self, subject: Subject, background: Background) -> None:
        """The second moment of the edited layer."""
        second_moments(subject, [layer_at(subject, self.parameters.depth)], background)

    @contextmanager
    def applied(
        self, subject: Subject, requests: Sequence[WeightRequest], background: Background
    ) -> Iterator[WeightChange]:
        """The model with the rank-one change."""
        need(requests, "ROME", most=1)
        layer = layer_at(subject, self.parameters.depth)
        weight = down_projection(subject, layer).weight
        moment = second_moments(subject, [layer], background)[layer]
        with restored([weight]):
            found = find_value(subject, requests[0], layer, self.parameters.search)
            update = exact_update(with_ridge(moment, self.parameters.ridge), found.key, found.change)
            with torch.no_grad():
                weight += update.to(weight)
            yield WeightChange(found.probability, found.steps)
