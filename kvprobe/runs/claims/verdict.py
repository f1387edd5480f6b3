"""Verdicts: a claim's outcome on one model, and the word for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvprobe.models.catalogue import Standing
from kvprobe.models.config import Tier
from kvprobe.runs.claims.claim import Claim, ClaimKind
from kvprobe.runs.records import StoredEffect
from kvprobe.viewing import Viewable

_FORMER = {"reproduced": "holds", "contradicted": "fails", "inconclusive": "open"}
_PRETRAINED = ("pocket", "local")


class Outcome(StrEnum):
    """What a run says about a claim on one model."""

    HOLDS = "holds"
    """The whole interval satisfies the statement."""
    FAILS = "fails"
    """No part of the interval satisfies it."""
    OPEN = "open"
    """The interval straddles the boundary."""
    UNDERPOWERED = "needs more pairs"
    """No sample of this size could make it hold."""
    NOT_APPLICABLE = "not applicable"
    """The model fails the inclusion gate, or could not be measured."""

    @classmethod
    def _missing_(cls, value: object) -> Outcome | None:
        """Summaries of earlier versions have other words."""
        return cls(_FORMER[value]) if isinstance(value, str) and value in _FORMER else None

    @property
    def decided(self) -> bool:
        """Whether it says yes or no."""
        return self in (Outcome.HOLDS, Outcome.FAILS)


@dataclass(frozen=True)
class Verdict(Viewable):
    """A claim's outcome on one model.

    Args:
        reason: one sentence.
        effect: what it was read from; `None` when nothing was measured.
        kind: whose statement the claim is; `None` in summaries of earlier versions.
        paper_value: of the paper's model of the same architecture, else its number for all models.
        paper_matches: whether it is of the paper's model of the same architecture.
        tells_apart: whether the claim comes out otherwise on a model set by hand that takes no notes.
        tier: of the model; see `kvprobe.models.config.ModelConfig`.
        paper_model: the paper's model it is set beside.
        p_value: of the boundary nearest to the estimate: two-sided, one-sided for a perfect score.
        p_reason: why there is no p value.
        p_benjamini_hochberg: adjusted within the experiment.
        p_holm: adjusted within the headline claims, of the experiment or, in a section's registry, of the section.
        level: error rate that an adjusted p is held against.
        changed: where the claim was made, changed or withdrawn after the first cell was measured, when and what it said
            before.
        margin_only: whether the model is measured on margins and no decision turns.
        shown_in: in a section's registry, the experiment that shows the same measurement first and counts it.
    """

    claim: str
    statement: str
    model: str
    outcome: Outcome
    reason: str
    effect: StoredEffect | None = None
    kind: ClaimKind | None = None
    source: str = ""
    paper_value: float | None = None
    paper_matches: bool = False
    headline: bool = False
    tells_apart: bool = True
    tier: Tier | None = None
    paper_model: str | None = None
    p_value: float | None = None
    p_reason: str = ""
    p_benjamini_hochberg: float | None = None
    p_holm: float | None = None
    level: float = 0.05
    changed: str = ""
    shown_in: str = ""
    margin_only: bool = False

    @property
    def word(self) -> str:
        """The outcome as it is said, with the grade where it is not that of decisions.

        Only the paper's own models, or pretrained ones that are named, reproduce or contradict what it states.
        """
        if not self.outcome.decided:
            return str(self.outcome)
        if self.kind is ClaimKind.IDENTITY:
            return "passes" if self.outcome is Outcome.HOLDS else "fails"
        grade = " (margin only)" if self.margin_only else ""
        if self.kind is not ClaimKind.PAPER or self.tier not in ("paper", *_PRETRAINED):
            return f"{self.outcome}{grade}"
        word = "reproduced" if self.outcome is Outcome.HOLDS else "contradicted"
        return (word if self.tier == "paper" else f"{word} on {self.model.rstrip('/').rsplit('/', 1)[-1]}") + grade

    @property
    def p_adjusted(self) -> float | None:
        """Holm's for a headline claim, Benjamini and Hochberg's for any other; `None` where nothing was tested."""
        return self.p_holm if self.headline else self.p_benjamini_hochberg

    @property
    def survives(self) -> bool:
        """Whether the adjusted p still supports what the interval alone decides; true where neither decides."""
        return not self.outcome.decided or self.p_adjusted is None or self.p_adjusted <= self.level


def told_by(claim: Claim, model: str, beside: Standing) -> dict[str, Any]:
    """What a verdict repeats of its claim and its model."""
    paper_value, matches = claim.paper_value_of(model, beside.paper_model)
    return {
        "claim": claim.id,
        "model": model,
        "statement": claim.statement,
        "kind": claim.kind,
        "source": claim.source,
        "paper_value": paper_value,
        "paper_matches": matches,
        "headline": claim.headline,
        "tells_apart": claim.tells_apart,
        "tier": beside.tier,
        "paper_model": beside.paper_model,
    }
