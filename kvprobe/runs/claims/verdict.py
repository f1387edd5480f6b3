"""Verdicts: what the interval of an effect says about a claim."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from kvprobe.errors import ConfigError
from kvprobe.models.catalogue import standing
from kvprobe.runs.claims.claim import Claim
from kvprobe.runs.claims.statement import Statement
from kvprobe.runs.records import StoredEffect
from kvprobe.stats import Effect
from kvprobe.viewing import Viewable


class Outcome(StrEnum):
    """What a run says about a claim on one model."""

    REPRODUCED = "reproduced"
    """The whole interval satisfies the statement."""
    CONTRADICTED = "contradicted"
    """No part of the interval satisfies it."""
    INCONCLUSIVE = "inconclusive"
    """The interval straddles the boundary, or too few clusters were measured to tell."""
    NOT_APPLICABLE = "not applicable"
    """The model fails the inclusion gate, or could not be measured."""


@dataclass(frozen=True)
class Verdict(Viewable):
    """A claim's outcome on one model.

    Args:
        reason: one sentence.
        effect: what it was read from; `None` when nothing was measured.
        p_value: two-sided, of the boundary nearest to the estimate, where the effect carries a standard error.
        p_benjamini_hochberg: adjusted within the experiment.
        p_holm: adjusted within the headline claims, of the experiment or, in a section's registry, of the section.
        level: error rate that an adjusted p is held against.
    """

    claim: str
    statement: str
    model: str
    outcome: Outcome
    reason: str
    effect: StoredEffect | None = None
    source: str = ""
    paper_value: float | None = None
    headline: bool = False
    p_value: float | None = None
    p_benjamini_hochberg: float | None = None
    p_holm: float | None = None
    level: float = 0.05

    @property
    def p_adjusted(self) -> float | None:
        """Holm's for a headline claim, Benjamini and Hochberg's for any other; `None` where nothing was tested."""
        return self.p_holm if self.headline else self.p_benjamini_hochberg

    @property
    def survives(self) -> bool:
        """Whether the adjusted p still supports what the interval alone decides; true where neither decides."""
        decided = self.outcome in (Outcome.REPRODUCED, Outcome.CONTRADICTED)
        return not decided or self.p_adjusted is None or self.p_adjusted <= self.level


def judge(
    claim: Claim, model: str, effects: Sequence[Effect], may_lack: Mapping[str, str] = MappingProxyType({})
) -> Verdict:
    """The verdict on `claim` from the effects measured on `model`.

    Args:
        claim: what is stated.
        model: name of the model.
        effects: what was measured on it.
        may_lack: why an effect may be missing, by a pattern of its name; such a claim is not applicable.

    Raises:
        ConfigError: no effect has the name the statement uses, and it may not be missing.
    """
    statement = claim.parsed
    if statement.effect not in {effect.name for effect in effects}:
        reasons = [why for pattern, why in may_lack.items() if fnmatchcase(statement.effect, pattern)]
        if reasons:
            return not_applicable(claim, model, reasons[0])
    effect = _effect_of(claim, statement, effects)
    outcome, reason = _outcome(statement, effect)
    return Verdict(
        **told_by(claim, model),
        outcome=outcome,
        reason=reason,
        effect=effect,
        p_value=_p_value(statement, effect),
        level=round(1 - effect.confidence, 9),
    )


def not_applicable(claim: Claim, model: str, reason: str) -> Verdict:
    """The verdict on a model that fails the gate or could not be measured."""
    return Verdict(**told_by(claim, model), outcome=Outcome.NOT_APPLICABLE, reason=reason)


def told_by(claim: Claim, model: str) -> dict[str, Any]:
    """What a verdict repeats of its claim."""
    return {
        "claim": claim.id,
        "model": model,
        "statement": claim.statement,
        "source": claim.source,
        "paper_value": claim.paper_value_of(model, standing(model).paper_model),
        "headline": claim.headline,
    }


def adjust(verdicts: Sequence[Verdict], false_discovery_rate: float = 0.05) -> list[Verdict]:
    """The verdicts of one experiment with p values adjusted: Benjamini-Hochberg over all, Holm over the headlines.

    `false_discovery_rate` is what the former are held against; the latter against 1 - confidence.
    """
    from kvprobe.stats import adjust_benjamini_hochberg

    adjusted = list(verdicts)
    tested = {i: verdict.p_value for i, verdict in enumerate(adjusted) if verdict.p_value is not None}
    for i, p in zip(tested, adjust_benjamini_hochberg(list(tested.values())), strict=True):
        level = adjusted[i].level if adjusted[i].headline else false_discovery_rate
        adjusted[i] = replace(adjusted[i], p_benjamini_hochberg=p, level=level)
    return adjust_headlines(adjusted)


def adjust_headlines(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, of one experiment or of several, with Holm's p over those on headline claims."""
    from kvprobe.stats import adjust_holm

    adjusted = list(verdicts)
    tested = {i: v.p_value for i, v in enumerate(adjusted) if v.headline and v.p_value is not None}
    for i, p in zip(tested, adjust_holm(list(tested.values())), strict=True):
        adjusted[i] = replace(adjusted[i], p_holm=p)
    return adjusted


def _effect_of(claim: Claim, statement: Statement, effects: Sequence[Effect]) -> Effect:
    by_name = {effect.name: effect for effect in effects}
    if statement.effect not in by_name:
        nearest = difflib.get_close_matches(statement.effect, by_name, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are: {', '.join(sorted(by_name)) or 'none'}."
        raise ConfigError(f"Claim {claim.id!r} is about {statement.effect!r}, which the probe does not measure; {hint}")
    return by_name[statement.effect]


def _outcome(statement: Statement, effect: Effect) -> tuple[Outcome, str]:
    low, high = statement.bounds_of(effect)
    kind = "range" if effect.is_range else "interval"
    ends = f"the {kind} [{low:.3f}, {high:.3f}]"
    # A range of G cluster values covers their median with probability 1 - 2^(1 - G), whatever the distribution.
    if effect.is_range and 1 - 2.0 ** (1 - effect.clusters) < effect.confidence:
        return Outcome.INCONCLUSIVE, f"{effect.clusters} clusters are too few for an interval; {ends} is all there is."
    if statement.contains(low, high):
        return Outcome.REPRODUCED, f"All of {ends} satisfies it."
    if statement.misses(low, high) and effect.unit == "p":
        # A test that does not reject shows nothing: few pairs fail an equivalence test whatever the truth is.
        return Outcome.INCONCLUSIVE, f"The test's p value {high:.3f} does not satisfy it, which shows nothing."
    if statement.misses(low, high):
        return Outcome.CONTRADICTED, f"None of {ends} satisfies it."
    return Outcome.INCONCLUSIVE, f"Part of {ends} satisfies it and part does not."


def _p_value(statement: Statement, effect: Effect) -> float | None:
    """Two-sided p of the boundary nearest to the estimate, since a verdict may fall to either side of it."""
    value = abs(effect.estimate) if statement.absolute else effect.estimate
    boundaries = [end for end in (statement.lower, statement.upper) if math.isfinite(end)]
    if effect.is_range or not boundaries:
        return None
    boundary = min(boundaries, key=lambda end: abs(value - end))
    if effect.method == "wilson":
        return _score_p(value, boundary, effect.extra["effective_n"])
    error, freedom = effect.extra.get("standard_error"), effect.extra.get("degrees_of_freedom")
    bounded = math.isfinite(effect.low) and math.isfinite(effect.high)
    if not bounded or not error or not freedom:
        return None
    from scipy import stats

    return min(1.0, 2 * float(stats.t.sf(abs(value - boundary) / error, freedom)))


def _score_p(share: float, boundary: float, size: float) -> float | None:
    """Of the score test that Wilson's interval inverts; there is none of a share that nothing or all must have."""
    if not 0 < boundary < 1:
        return None
    from scipy import stats

    error = math.sqrt(boundary * (1 - boundary) / size)
    return min(1.0, 2 * float(stats.norm.sf(abs(share - boundary) / error)))
