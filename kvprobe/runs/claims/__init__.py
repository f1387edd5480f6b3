"""Claims, fixed before the run, and the verdicts on them, computed from intervals."""

from kvprobe.runs.claims.claim import Claim, ClaimKind
from kvprobe.runs.claims.statement import Statement, parse_statement
from kvprobe.runs.claims.verdict import (
    Outcome,
    Verdict,
    adjust,
    adjust_headlines,
    judge,
    not_applicable,
    told_by,
)

__all__ = [
    "Claim",
    "ClaimKind",
    "Outcome",
    "Statement",
    "Verdict",
    "adjust",
    "adjust_headlines",
    "judge",
    "not_applicable",
    "parse_statement",
    "told_by",
]
