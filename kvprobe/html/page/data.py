"""What the page shows of a run, as plain values for its script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kvprobe.errors import KvprobeError
from kvprobe.figures.by_model import color_of
from kvprobe.html.page.views import regions_of, views_of
from kvprobe.report.reference import paper_model, paper_values
from kvprobe.report.section_tables import p_text
from kvprobe.report.tables import interval, number, short
from kvprobe.runs.claims import Verdict
from kvprobe.runs.explain import NamedRows, command_of, rows_that_count
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.results import CONFIG, RunResult
from kvprobe.stats import Effect

ROWS_SHOWN = 5
"""Rows kept behind each effect; all are in the run's folder."""
_DIGITS = 6
_NUMBERS = ("name", "model", "text", "estimate", "low", "high", "n", "clusters", "excluded", "noise_floor")
_FIELDS = (*_NUMBERS, "unit", "method", "seed", "confidence", "extra", "paper", "chosen", "matched", "rows")
_HIDDEN = frozenset({"experiment", "model", "included"})


@dataclass
class ExperimentData:
    """One experiment of the page.

    Args:
        values: for the page's script.
        places: of each effect among those of `values`, by model and name.
        problems: one sentence on each thing that could not be read.
    """

    values: dict[str, Any]
    places: dict[tuple[str, str], int]
    problems: list[str] = field(default_factory=list)


def experiment_data(
    result: RunResult, verdicts: Sequence[Verdict], models: Sequence[str], folder: Path
) -> ExperimentData:
    """All that the page says about a run.

    Args:
        result: the run.
        verdicts: on its claims, adjusted over the section.
        models: of the whole section, whose order gives each its colour.
        folder: of all results, from which paths are told.
    """
    problems: list[str] = []
    paper = _paper_of(result, verdicts, problems)
    rows, kept = _rows_of(result, problems)
    effects: list[list[Any]] = []
    places: dict[tuple[str, str], int] = {}
    for place, model in enumerate(result.models.values()):
        for effect in model.effects:
            places[model.name, effect.name] = len(effects)
            behind: tuple[Any, ...] = rows.get((model.name, effect.name), (None, None, []))
            effects.append([*_effect_values(effect, place), paper.get((model.name, effect.name)), *behind])
    values = {
        **_run_values(result, folder, problems),
        "models": [_model_values(result, name, list(models).index(name)) for name in result.models],
        "claims": [
            {**claim.model_dump(include={"id", "statement", "source", "headline"}), "effect": claim.parsed.effect}
            | {"regions": regions_of(claim), "models": claim.models}
            for claim in result.config.claims
        ],
        "verdicts": [_verdict_values(verdict) for verdict in verdicts],
        "fields": list(_FIELDS),
        "effects": effects,
        "rows": kept,
        "views": [view.to_record() for view in views_of(result)],
    }
    return ExperimentData(values, places, problems)


def _run_values(result: RunResult, folder: Path, problems: list[str]) -> dict[str, Any]:
    config = result.config
    try:
        resolved = (result.folder / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        problems.append(f"{result.folder / CONFIG} cannot be read; the configuration shown is the summary's.")
        resolved = config.to_yaml()
    return {
        "name": config.name,
        "question": config.question,
        "hash": result.hash,
        "profile": config.profile,
        "command": command_of(result),
        "folder": str(result.folder.relative_to(folder)),
        "config": resolved,
        "provenance": result.provenance,
        "cluster": config.statistics.cluster,
        "seeds": {"task": config.task.parameters.get("seed"), "statistics": config.statistics.seed},
    }


def _model_values(result: RunResult, name: str, place: int) -> dict[str, Any]:
    model = result.models[name]
    return {
        "name": name,
        "label": short(name),
        "place": place,
        "color": color_of(place),
        "status": str(model.status),
        "reason": model.reason,
        "identity": model.identity,
        "paper": paper_model(name, str(model.identity.get("architecture", ""))),
    }


def _verdict_values(verdict: Verdict) -> dict[str, Any]:
    return {
        "claim": verdict.claim,
        "model": verdict.model,
        "outcome": str(verdict.outcome),
        "reason": verdict.reason,
        "p": p_text(verdict.p_value),
        "adjusted": p_text(verdict.p_adjusted),
        "survives": verdict.survives,
    }


def _effect_values(effect: Effect, model: int) -> list[Any]:
    """The effect's `_FIELDS` up to `extra`."""
    ends = [_plain(value) for value in (effect.estimate, effect.low, effect.high)]
    counts = [effect.n, effect.clusters, effect.excluded, _plain(effect.noise_floor)]
    extra = {name: number(value) if math.isfinite(value) else str(value) for name, value in effect.extra.items()}
    how = [effect.unit, effect.method, effect.seed, effect.confidence, extra]
    return [effect.name, model, interval(effect), *ends, *counts, *how]


def _paper_of(result: RunResult, verdicts: Sequence[Verdict], problems: list[str]) -> dict[tuple[str, str], float]:
    """The paper's values by model and effect: those of the claims, else those its tables give for the probe."""
    found: dict[tuple[str, str], float] = {}
    try:
        entries = make_probe(result.config).read_by().paper
    except KvprobeError as error:
        problems.append(f"{error} The paper's values are those of the claims alone.")
        entries = {}
    for model in result.models.values():
        reference = paper_model(model.name, str(model.identity.get("architecture", "")))
        found |= {(model.name, name): value for name, value in paper_values(entries, reference).items()}
    claims = {claim.id: claim.parsed.effect for claim in result.config.claims}
    for verdict in verdicts:
        if verdict.paper_value is not None and verdict.claim in claims:
            found[verdict.model, claims[verdict.claim]] = verdict.paper_value
    return found


def _rows_of(
    result: RunResult, problems: list[str]
) -> tuple[Mapping[tuple[str, str], tuple[list[str], int, list[int]]], dict[str, Any]]:
    """By model and effect how its rows were chosen, how many there are, and the first; and the table these stand in."""
    if not any(model.effects for model in result.models.values()):
        return {}, {"columns": [], "cells": []}
    try:
        rows = result.rows()
    except KvprobeError as error:
        problems.append(f"{error} Until then the rows behind the numbers of {result.config.name} are not shown.")
        return {}, {"columns": [], "cells": []}
    behind: dict[tuple[str, str], tuple[list[str], int, list[int]]] = {}
    kept: dict[int, int] = {}
    for model in result.models.values():
        named = NamedRows(rows_that_count(rows[rows["model"] == model.name]))
        labels = named.rows.index
        for effect in model.effects:
            places, chosen = named.of(effect.name)
            first = [kept.setdefault(int(labels[place]), len(kept)) for place in places[:ROWS_SHOWN]]
            behind[model.name, effect.name] = list(chosen), len(places), first
    table = rows.loc[list(kept)]
    columns = [c for c in table if c not in _HIDDEN and not str(c).startswith("scenario_") and table[c].notna().any()]
    cells = [[_plain(value) for value in line] for line in table[columns].itertuples(index=False, name=None)]
    return behind, {"columns": columns, "cells": cells}


def _plain(value: Any) -> Any:
    """A value for strict JSON: what is missing or unbounded is `None`, and long texts are cut."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, int):
        return value
    if not isinstance(value, str) and (value is None or pd.api.types.is_scalar(value)):
        return None if pd.isna(value) else str(value)
    text = str(value)
    return text if len(text) <= 48 else f"{text[:47]}…"
