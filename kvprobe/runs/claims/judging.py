"""The verdict follows from the interval alone; where it decides nothing, whether more data could."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from kvprobe.errors import ConfigError, did_you_mean
from kvprobe.models.catalogue import Standing, standing
from kvprobe.runs.claims.claim import Claim, ClaimKind
from kvprobe.runs.claims.p_values import p_value
from kvprobe.runs.claims.power import clusters_needed, is_share, least_for_a_range
from kvprobe.runs.claims.statement import Statement
from kvprobe.runs.claims.verdict import Outcome, Verdict, told_by
from kvprobe.stats import Effect


def judge(
    claim: Claim,
    model: str,
    effects: Sequence[Effect],
    may_lack: Mapping[str, str] = MappingProxyType({}),
    beside: Standing | None = None,
) -> Verdict:
    """The verdict on `claim` from the effects measured on `model`.

    Args:
        claim: what is stated.
        model: name of the model.
        effects: what was measured on it.
        may_lack: why an effect may be missing, by a pattern of its name; such a claim is not applicable.
        beside: the model's tier and the paper's model of its architecture; looked up by its name where not given.

    Raises:
        ConfigError: no effect has the name the statement uses, and it may not be missing.
    """
    statement = claim.parsed
    if statement.effect not in {effect.name for effect in effects}:
        reasons = [why for pattern, why in may_lack.items() if fnmatchcase(statement.effect, pattern)]
        if reasons:
            return not_applicable(claim, model, reasons[0], beside)
    effect = _effect_of(claim, statement, effects)
    outcome, reason = _outcome(claim.kind, statement, effect)
    p, p_reason = p_value(claim.kind, statement, effect)
    return Verdict(
        **told_by(claim, model, beside or standing(model)),
        outcome=outcome,
        reason=reason,
        effect=effect,
        p_value=p,
        p_reason=p_reason,
        level=round(1 - effect.confidence, 9),
    )


def not_applicable(claim: Claim, model: str, reason: str, beside: Standing | None = None) -> Verdict:
    """The verdict on a model that fails the gate or could not be measured."""
    told = told_by(claim, model, beside or standing(model))
    return Verdict(**told, outcome=Outcome.NOT_APPLICABLE, reason=reason, p_reason="nothing was measured")


def _effect_of(claim: Claim, statement: Statement, effects: Sequence[Effect]) -> Effect:
    by_name = {effect.name: effect for effect in effects}
    if statement.effect not in by_name:
        told = f"Claim {claim.id!r} is about {statement.effect!r}, which the probe does not measure"
        raise ConfigError(f"{told}; {did_you_mean(statement.effect, by_name)}")
    return by_name[statement.effect]


def _outcome(kind: ClaimKind | None, statement: Statement, effect: Effect) -> tuple[Outcome, str]:
    if kind is ClaimKind.IDENTITY and is_share(effect):
        # A check is of these rows, and infers nothing of others.
        told = f"{round(effect.estimate * effect.n)} of {effect.n} rows."
        return (Outcome.HOLDS if statement.satisfied_by(effect.estimate) else Outcome.FAILS), told
    low, high = statement.bounds_of(effect)
    ends = f"the {'range' if effect.is_range else 'interval'} [{low:.3f}, {high:.3f}]"
    needed = least_for_a_range(effect.confidence)
    if effect.is_range and effect.clusters < needed and kind is not ClaimKind.IDENTITY:
        told = f"{effect.clusters} clusters are too few for an interval, {ends} is all there is; needs n >= {needed}."
        return Outcome.UNDERPOWERED, told
    if statement.contains(low, high):
        return Outcome.HOLDS, f"All of {ends} satisfies it."
    if statement.misses(low, high) and effect.unit != "p":
        return Outcome.FAILS, f"None of {ends} satisfies it."
    return _undecided(statement, effect, ends)


def _undecided(statement: Statement, effect: Effect, ends: str) -> tuple[Outcome, str]:
    if effect.unit == "p":
        # A test that does not reject shows nothing: few pairs fail an equivalence test whatever the truth is.
        return Outcome.OPEN, f"The test's p value {effect.estimate:.3f} does not satisfy it, which shows nothing."
    straddles = f"Part of {ends} satisfies it and part does not"
    if more := clusters_needed(statement, effect):
        told = f"{straddles}, and no sample of {effect.clusters} clusters could settle it; needs n >= {more}."
        return Outcome.UNDERPOWERED, told
    return Outcome.OPEN, f"{straddles}."
