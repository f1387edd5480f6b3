"""Verdicts and runs as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvprobe.html.effects import bar, effects_html
from kvprobe.html.style import OUTCOMES
from kvprobe.html.templating import render
from kvprobe.report.counts import by_kind, count_sentence
from kvprobe.report.tables import VerdictLine
from kvprobe.runs.claims import Verdict
from kvprobe.runs.results import ModelResult, RunResult

_ABSENT: dict[str, Any] = {"title": "", "question": "", "counts": "", "reason": "", "models": [], "folder": ""}


def verdict_html(verdict: Verdict) -> str:
    """One verdict, with its reason."""
    return render("verdicts", **{**_ABSENT, "reason": verdict.reason}, **_claims([verdict]))


def run_html(result: RunResult) -> str:
    """All verdicts of a run, claim by claim, and what became of each model."""
    return render(
        "verdicts",
        title=f"{result.config.name} {result.hash[:8]}",
        question=result.config.question,
        counts=count_sentence(result.verdicts),
        reason=result.altered,
        models=list(result.models.values()),
        folder=str(result.folder),
        **_claims(result.verdicts),
    )


def model_html(model: ModelResult) -> str:
    """What became of one model, and its effects."""
    told = render("verdicts", **{**_ABSENT, "models": [model]}, **_claims([]))
    return told + (effects_html({"": model.effects}) if model.effects else "")


def _claims(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    claims = []
    ordered = [verdict for _, own in by_kind(verdicts) for verdict in own]
    for name in dict.fromkeys(verdict.claim for verdict in ordered):
        own = [verdict for verdict in verdicts if verdict.claim == name]
        claims.append(
            {"name": name, "statement": own[0].statement, "kind": own[0].kind, "lines": [_line(v, own) for v in own]}
        )
    return {"claims": claims, "lost": any(not verdict.survives for verdict in verdicts)}


def _line(verdict: Verdict, beside: Sequence[Verdict]) -> dict[str, Any]:
    effect = verdict.effect
    return {
        "text": VerdictLine.of(verdict),
        "bar": bar(effect, [other.effect for other in beside if other.effect]) if effect else None,
        "counts": [effect.n, effect.clusters, effect.excluded] if effect else ["–"] * 3,
        "reason": verdict.reason,
        "style": OUTCOMES[verdict.outcome],
        "survives": verdict.survives,
    }
