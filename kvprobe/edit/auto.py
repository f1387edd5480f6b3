"""AUTO: choose, before paying, the edit that is expected to cost least, errors included (issue of critique ED7).

From signals that need no forward pass a logistic regression predicts for each candidate whether it would decide as a
full reprefill does. The candidate with the least expected loss is taken:

    loss = error_cost * P(it decides otherwise) + its tokens / tokens of a full prefill

Only candidates that run no more tokens than an erratum are offered, and the signals are read off the tokens, so AUTO
never costs more than always appending an erratum. It is fitted on some skeletons and must be judged on others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvprobe.edit.base import CachedPrompt, Edited, EditMethod, FieldEdit, make_method
from kvprobe.edit.signals import FREE, free_signals
from kvprobe.errors import SampleError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

CANDIDATES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "stale": ("stale", {}),
    "field_only": ("field_only", {}),
    "selective_4": ("selective", {"k": 4, "criterion": "suffix"}),
    "erratum": ("erratum", {}),
}
"""Names and the method with its parameters, from the cheapest on; the last one bounds the cost."""


def candidate(name: str) -> EditMethod:
    """The edit method of one candidate."""
    method, parameters = CANDIDATES[name]
    return make_method(method, **parameters)


def token_shares(stale: CachedPrompt, edit: FieldEdit) -> dict[str, float]:
    """Tokens each candidate runs, as a share of a full prefill; those dearer than the last candidate are left out."""
    whole = make_method("full_reprefill").tokens(stale, edit)
    shares = {name: candidate(name).tokens(stale, edit) / whole for name in CANDIDATES}
    bound = list(shares.values())[-1]
    return {name: share for name, share in shares.items() if share <= bound}


@dataclass(frozen=True)
class Case:
    """One edit to learn from: its signals, and of each candidate whether it decided as a full reprefill did."""

    signals: Mapping[str, float]
    agrees: Mapping[str, bool]


class Auto(EditMethod):
    """Take the candidate of least expected loss, as learned from other edits.

    Args:
        models: for each candidate a fitted classifier, or the share of agreeing cases where all were alike.
        error_cost: what a wrong decision costs, in full prefills.
    """

    name: ClassVar[str] = "auto"

    def __init__(self, models: Mapping[str, Any], error_cost: float) -> None:
        super().__init__()
        self.models = dict(models)
        self.error_cost = error_cost

    @classmethod
    def fit(cls, cases: Sequence[Case], *, error_cost: float = 10.0) -> Auto:
        """Learn from edits whose outcome is known.

        Raises:
            SampleError: there is no case.
        """
        if not cases:
            raise SampleError("AUTO needs edits to learn from; give it some cases of other scenarios.")
        features = np.array([[case.signals[name] for name in FREE] for case in cases])
        models: dict[str, Any] = {}
        for name in CANDIDATES:
            agrees = np.array([case.agrees[name] for case in cases])
            # One case of either outcome beyond those seen: nothing is certain after a finite number of edits.
            share = (agrees.sum() + 1) / (len(agrees) + 2)
            models[name] = float(share) if agrees.all() or not agrees.any() else _classifier().fit(features, agrees)
        return cls(models, error_cost)

    def agreement(self, signals: Mapping[str, float]) -> dict[str, float]:
        """For each candidate the predicted probability of deciding as a full reprefill does."""
        row = np.array([[signals[name] for name in FREE]])
        return {
            name: model if isinstance(model, float) else float(model.predict_proba(row)[0, 1])
            for name, model in self.models.items()
        }

    def choose(self, signals: Mapping[str, float], shares: Mapping[str, float]) -> str:
        """The candidate of least expected loss; of equals, the cheapest."""
        agreement = self.agreement(signals)
        return min(shares, key=lambda name: self.error_cost * (1 - agreement[name]) + shares[name])

    def chosen(self, stale: CachedPrompt, edit: FieldEdit) -> str:
        """The candidate for one edit; the model is not run."""
        return self.choose(free_signals(stale, edit), token_shares(stale, edit))

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The chosen candidate's edit."""
        return candidate(self.chosen(stale, edit)).apply(subject, stale, edit)

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """Those of the chosen candidate."""
        return candidate(self.chosen(stale, edit)).tokens(stale, edit)


def _classifier() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000))
