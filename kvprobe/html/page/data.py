"""What the page holds of one experiment: its charts, and what the panel behind each number says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.errors import KvprobeError
from kvprobe.html.page.charts import Chart, Mark, Model
from kvprobe.html.page.views import views_of
from kvprobe.html.templating import render
from kvprobe.report.counts import TITLES
from kvprobe.report.reference import paper_model, paper_values
from kvprobe.report.section_tables import HEADLINE, p_text
from kvprobe.report.tables import number, short
from kvprobe.runs.claims import Claim, Verdict
from kvprobe.runs.explain import command_of, rows_that_count
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.results import CONFIG, RunResult
from kvprobe.stats import Effect
from kvprobe.viewing import visible

ROWS_SHOWN = 3
"""Rows kept behind each effect; all are in the run's folder."""
_LONGEST = 48
"""Characters of a text in a row."""
_DIGITS = 6
_HIDDEN = frozenset({"experiment", "model", "included"})
_FACTS = ("unit", "interval", "n", "clusters", "excluded", "noise floor", "seed", "the paper's value")
_Key = tuple[str, str]
"""Model and name of an effect."""


@dataclass
class ExperimentData:
    """One experiment of the page.

    Args:
        values: for the page's script.
        places: of each effect among those of `values`, by model and name.
        height: of the first chart, in pixels.
        problems: one sentence on each thing that could not be read.
    """

    values: dict[str, Any]
    places: dict[_Key, int]
    height: int
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
    marks = _marks(result, verdicts, problems)
    rows, kept = _rows_of(result, problems)
    shown = {name: _model(result, name, list(models).index(name)) for name in result.models}
    beside = list(shown.values())
    charts = _charts(result, beside, marks)
    claimed = {key: [_judged(*each) for each in judged] for key, judged in _claims_on(result, verdicts).items()}
    values = {
        "facts": _FACTS,
        "models": [{"name": name, "label": shown[name].label, "about": _about(result, name)} for name in shown],
        "effects": [
            [
                mark.effect.name,
                mark.model,
                mark.text,
                *_facts(mark, result, beside),
                claimed.get(key, []),
                *rows[key],
            ]
            for key, mark in marks.items()
        ],
        "rows": kept,
        "origin": _origin(result, folder, problems),
        "charts": [
            {"label": chart.view.label, "effects": chart.view.effects, "figure": chart.figure()} for chart in charts
        ],
    }
    places = {key: mark.place for key, mark in marks.items()}
    return ExperimentData(values, places, charts[0].height if charts else 0, problems)


def _marks(result: RunResult, verdicts: Sequence[Verdict], problems: list[str]) -> dict[_Key, Mark]:
    paper = _paper_of(result, verdicts, problems)
    marks: dict[_Key, Mark] = {}
    for place, model in enumerate(result.models.values()):
        for effect in model.effects:
            key = model.name, effect.name
            marks[key] = Mark(len(marks), place, effect, paper.get(key))
    return marks


def _model(result: RunResult, name: str, place: int) -> Model:
    identity = result.models[name].identity
    return Model(short(name), place, paper_model(name, str(identity.get("architecture", ""))))


def _charts(result: RunResult, models: Sequence[Model], marks: Mapping[_Key, Mark]) -> list[Chart]:
    by_name: dict[str, list[Mark]] = {}
    for (_, name), mark in marks.items():
        by_name.setdefault(name, []).append(mark)
    claims: dict[str, list[Claim]] = {}
    for claim in result.config.claims:
        claims.setdefault(claim.parsed.effect, []).append(claim)
    return [
        Chart(view, models, [by_name[name] for name in view.effects], [claims.get(name, []) for name in view.effects])
        for view in views_of(result)
    ]


def _claims_on(result: RunResult, verdicts: Sequence[Verdict]) -> dict[_Key, list[tuple[Claim, Verdict]]]:
    """The claims on each effect with their verdicts."""
    claims = {claim.id: claim for claim in result.config.claims}
    found: dict[_Key, list[tuple[Claim, Verdict]]] = {}
    for verdict in verdicts:
        if (claim := claims.get(verdict.claim)) is not None:
            found.setdefault((verdict.model, claim.parsed.effect), []).append((claim, verdict))
    return found


def _facts(mark: Mark, result: RunResult, models: Sequence[Model]) -> tuple[list[Any], dict[str, str]]:
    """The effect's `_FACTS`, and its side figures."""
    effect, statistics, beside = mark.effect, result.config.statistics, models[mark.model].paper
    seeds = f"task {result.config.task.parameters.get('seed', 'none')}, statistics {statistics.seed}"
    too_few = "range of the clusters (too few for an interval)"
    facts = [
        effect.unit,
        too_few if effect.is_range else f"{100 * effect.confidence:.4g}%, {effect.method}",
        effect.n,
        f"{effect.clusters} (by {statistics.cluster})",
        effect.excluded,
        f"{effect.noise_floor:.6g}",
        f"{'none for the interval' if effect.seed is None else effect.seed}; {seeds}",
        "none given" if mark.paper is None else f"{mark.paper:.6g}" + (f" (beside {beside})" if beside else ""),
    ]
    extra = {
        name.replace("_", " "): number(value) if math.isfinite(value) else str(value)
        for name, value in effect.extra.items()
    }
    return facts, extra


def _judged(claim: Claim, verdict: Verdict) -> dict[str, str]:
    lost = "" if verdict.survives else " († not supported after adjustment)"
    p = f"{p_text(verdict.p_value, verdict.p_reason)}; adjusted {p_text(verdict.p_adjusted)}{lost}"
    title = f"{HEADLINE} Claim {claim.id}" if claim.headline else f"Claim {claim.id}"
    facts = [("kind", TITLES[claim.kind]), ("source", claim.source), ("p", p), ("history", verdict.changed)]
    told = render("page/claim", title=title, claim=claim, verdict=verdict, facts=facts)
    return {"statement": claim.statement, "outcome": verdict.word, "html": told}


def _about(result: RunResult, name: str) -> str:
    model = result.models[name]
    identity = [(key.replace("_", " "), value) for key, value in model.identity.items() if key != "name"]
    return render("page/facts", pairs=[("name", name), *identity, ("gate", model.reason)])


def _origin(result: RunResult, folder: Path, problems: list[str]) -> str:
    """How the run was made, and how to make it again."""
    config, provenance = result.config, result.provenance
    try:
        resolved = (result.folder / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        problems.append(f"{result.folder / CONFIG} cannot be read; the configuration shown is the one in the summary.")
        resolved = config.to_yaml()
    code = provenance.get("code", {})
    changes = {True: ", with uncommitted changes", False: ", no uncommitted changes"}.get(code.get("dirty"), "")
    commit = f"commit {code['commit']}{changes}" if code.get("commit") else "no commit"
    pairs = [
        ("experiment", f"{config.name}, hash {result.hash}"),
        ("profile", config.profile),
        ("code", f"kvprobe {code.get('version', 'unknown')}, {commit}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in provenance.get("packages", {}).items())),
        ("threads", provenance.get("threads")),
        ("folder", str(result.folder.relative_to(folder))),
    ]
    commands = [("run again", command_of(result)), ("rows", f"kvprobe explain {config.name}")]
    return render("page/origin", commands=commands, pairs=pairs, config=resolved)


def _paper_of(result: RunResult, verdicts: Sequence[Verdict], problems: list[str]) -> dict[_Key, float]:
    """The paper's values by model and effect: those of the claims, else those its tables give for the probe."""
    found: dict[_Key, float] = {}
    try:
        entries = make_probe(result.config).read_by().paper
    except KvprobeError as error:
        problems.append(f"{error} Only the paper's values named in claims are shown.")
        entries = {}
    for model in result.models.values():
        reference = paper_model(model.name, str(model.identity.get("architecture", "")))
        found |= {(model.name, name): value for name, value in paper_values(entries, reference).items()}
    claims = {claim.id: claim.parsed.effect for claim in result.config.claims}
    for verdict in verdicts:
        if verdict.paper_value is not None and verdict.claim in claims:
            found[verdict.model, claims[verdict.claim]] = verdict.paper_value
    return found


def _rows_of(result: RunResult, problems: list[str]) -> tuple[dict[_Key, tuple[str, list[int]]], dict[str, Any]]:
    """For each effect a sentence on its rows and the first of them; and the table these stand in."""
    keys = [(model.name, effect.name) for model in result.models.values() for effect in model.effects]
    unread: dict[_Key, tuple[str, list[int]]] = dict.fromkeys(keys, ("The run's rows could not be read.", []))
    if not keys:
        return {}, {"columns": [], "cells": []}
    try:
        rows = result.rows()
    except KvprobeError as error:
        problems.append(f"{error} Until then the rows of {result.config.name} are not shown.")
        return unread, {"columns": [], "cells": []}
    behind: dict[_Key, tuple[str, list[int]]] = {}
    kept: dict[int, int] = {}
    for model in result.models.values():
        counted = _Filtered(rows_that_count(rows[rows["model"] == model.name]))
        for effect in model.effects:
            own = counted.index_of(effect)
            first = [kept.setdefault(int(label), len(kept)) for label in own[:ROWS_SHOWN]]
            behind[model.name, effect.name] = _sentence(effect, len(own), len(first)), first
    table = rows.loc[list(kept)]
    columns = [c for c in table if c not in _HIDDEN and not str(c).startswith("scenario_") and table[c].notna().any()]
    cells = [[_plain(value) for value in line] for line in table[columns].itertuples(index=False, name=None)]
    return behind, {"columns": columns, "cells": cells}


class _Filtered:
    """The rows of one model that count; conditions that many effects share are looked up once."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self._rows = rows
        self._masks: dict[tuple[str, tuple[Any, ...] | None], np.ndarray] = {}

    def index_of(self, effect: Effect) -> pd.Index:
        """Labels of the rows that an effect was made of."""
        if effect.rows is None:
            return self._rows.index[:0]
        keep = np.ones(len(self._rows), dtype=bool)
        for column, values in (*effect.rows.values.items(), *((name, None) for name in effect.rows.measured)):
            if (column, values) not in self._masks:
                told = self._rows[column]
                self._masks[column, values] = (told.notna() if values is None else told.isin(values)).to_numpy()
            keep &= self._masks[column, values]
        return self._rows.index[keep]


def _sentence(effect: Effect, count: int, shown: int) -> str:
    if effect.rows is None:
        return "This effect does not record its rows."
    return f"{count} included rows ({effect.rows.describe()}); the first {shown}:"


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
    text = visible(str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
