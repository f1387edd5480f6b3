"""Verdicts counted, kinds of claims apart: a check of the implementation is no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvprobe.runs.claims import ClaimKind, Outcome, Verdict

TITLES: dict[ClaimKind | None, str] = {
    ClaimKind.PAPER: "The paper's claims",
    ClaimKind.CRITIQUE: "Our own controls",
    ClaimKind.COST: "Costs",
    None: "Claims without a kind",
    ClaimKind.IDENTITY: "Checks, true by construction",
}
CHANGED = "‡"
"""Marks a claim that was made, changed or withdrawn after the first cell was measured."""
_SHORT = {
    ClaimKind.PAPER: "paper",
    ClaimKind.CRITIQUE: "controls",
    ClaimKind.COST: "costs",
    None: "without a kind",
    ClaimKind.IDENTITY: "checks",
}
_SAID = {
    Outcome.HOLDS: "hold",
    Outcome.FAILS: "fail",
    Outcome.OPEN: "open",
    Outcome.UNDERPOWERED: "need more pairs",
    Outcome.NOT_APPLICABLE: "not applicable",
}


def by_kind(verdicts: Iterable[Verdict]) -> Iterator[tuple[ClaimKind | None, list[Verdict]]]:
    """The verdicts kind by kind, the paper's claims first and checks last, each kind in the order given."""
    verdicts = list(verdicts)
    for kind in TITLES:
        if own := [verdict for verdict in verdicts if verdict.kind is kind]:
            yield kind, own


def counted(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those that count: a measurement shown by several experiments is counted once."""
    return [verdict for verdict in verdicts if not verdict.shown_in]


def count_sentence(verdicts: Iterable[Verdict]) -> str:
    """`paper: 80 hold, 12 fail (61 with the paper's number for the same architecture) · checks: 42 of 42 pass`."""
    return " · ".join(f"{_SHORT[kind]}: {counts_of(kind, own)}" for kind, own in by_kind(counted(verdicts)))


def counts_of(kind: ClaimKind | None, verdicts: Sequence[Verdict]) -> str:
    """`80 hold, 12 fail, 9 open`, of one kind of claims."""
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    if kind is ClaimKind.IDENTITY:
        measured = len(verdicts) - outcomes[Outcome.NOT_APPLICABLE]
        return f"{outcomes[Outcome.HOLDS]} of {measured} pass"
    # A model that is named reproduces for itself: its name is in the word of each verdict.
    words = Counter(_SAID[v.outcome] if v.word.startswith(v.outcome) else v.word.partition(" ")[0] for v in verdicts)
    order = ["reproduced", "contradicted", *_SAID.values()]
    told = ", ".join(f"{words[word]} {word}" for word in order if words[word])
    beside = sum(v.paper_matches and v.outcome is Outcome.HOLDS for v in verdicts)
    return told + (
        f" ({beside} with the paper's number for the same architecture)" if kind is ClaimKind.PAPER and beside else ""
    )


def history(verdict: Verdict) -> str:
    """What the claim was when the first cell was measured, in brackets; empty where it is the same."""
    return f" ({verdict.changed})" if verdict.changed else ""


def fixed_before(verdicts: Iterable[Verdict]) -> str:
    """Whether claims were fixed before the run, in one sentence."""
    changed = any(verdict.changed for verdict in verdicts)
    return f"Claims were fixed before the run{f', but for those marked {CHANGED}' if changed else ''}."
