"""Outcomes on models whose weights were set by hand, compared with what each claim declares for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvprobe.models.config import HAND_SET
from kvprobe.runs.claims import Claim, Outcome, Verdict
from kvprobe.runs.results import RunResult


def calibration_faults(results: Iterable[RunResult]) -> list[str]:
    """One sentence for each claim that came out other than declared; none where no hand-set model was run."""
    return [
        f"{result.config.name}/{claim.id}: {fault}"
        for result in results
        for claim in result.config.claims
        for fault in _faults(claim, [verdict for verdict in result.verdicts if verdict.claim == claim.id])
    ]


def _faults(claim: Claim, verdicts: Iterable[Verdict]) -> Iterator[str]:
    outcomes = {
        verdict.model.removeprefix(HAND_SET): verdict
        for verdict in verdicts
        if verdict.tier == "micro" and verdict.model.startswith(HAND_SET)
    }
    for name, verdict in outcomes.items():
        declared = claim.calibration.get(name, verdict.outcome)
        if declared != verdict.outcome:
            yield f"{verdict.outcome} on {verdict.model}, declared as {declared!r}. {verdict.reason}"
    # Where both are left to chance, one may fail and the other stay open: neither tells the two apart.
    if claim.same and {Outcome.HOLDS, Outcome.FAILS} <= {verdict.outcome for verdict in outcomes.values()}:
        told = ", ".join(f"{verdict.outcome} on {verdict.model}" for verdict in outcomes.values())
        yield f"{told}, though it is declared to tell nothing apart ({claim.same})."
