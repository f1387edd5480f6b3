"""From a figure or a number back to its rows, its configuration and the command that makes it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image, UnidentifiedImageError

from kvprobe.errors import ConfigError, StoreError, UnknownNameError
from kvprobe.models.catalogue import Standing
from kvprobe.runs.claims import Verdict, judge
from kvprobe.runs.config import load_config
from kvprobe.runs.results import CONFIG, SUMMARY, ModelResult, RunResult, effects_of_rows, find_runs, load_result
from kvprobe.runs.store import SHORT_HASH
from kvprobe.stats import Effect

FIGURE_KEY = "kvprobe"
_COMPARED = ("estimate", "low", "high", "n", "clusters")


@dataclass(frozen=True)
class Explanation:
    """Where something comes from.

    Args:
        target: what was asked about.
        kind: `run`, `model`, `effect`, `claim` or `cell`.
        result: the run it belongs to.
        models: the models concerned.
        rows: the measurements behind it; for effects, those they were made of.
        effects: by model, when it is about an effect.
        verdicts: when it is about a claim.
        command: makes all of it again.
        config: the resolved experiment file.
    """

    target: str
    kind: str
    result: RunResult
    models: tuple[ModelResult, ...]
    rows: pd.DataFrame
    effects: Mapping[str, Effect]
    verdicts: tuple[Verdict, ...]
    command: str
    config: Path

    def lines(self) -> list[str]:
        """The explanation as text."""
        result = self.result
        return [
            f"{self.target}: {self.kind} of experiment {result.config.name} ({result.hash[:SHORT_HASH]})",
            f"question: {result.config.question or 'not stated'}",
            f"command: {self.command}",
            f"config: {self.config}",
            f"rows: {len(self.rows)} in {result.folder / 'rows.parquet'}",
            *(f"{name}: {effect} ({effect.method}); {chosen_by(effect)}" for name, effect in self.effects.items()),
            *([f"WARNING: {result.altered}"] if result.altered else []),
            *disagreements(result, self.effects, self.verdicts),
            *(f"{v.model}: {v.statement}: {v.word}. {v.reason}{_p_line(v)}{_history(v)}" for v in self.verdicts),
            *(_model_line(model) for model in self.models),
            _code_line(result.provenance),
        ]


def disagreements(result: RunResult, effects: Mapping[str, Effect], verdicts: Sequence[Verdict] = ()) -> list[str]:
    """Where a summary is not what its rows give: one of the two was changed, or is of another version.

    Args:
        result: the run.
        effects: of it, one for each model that is asked about.
        verdicts: of it, whose outcomes are held against their effects.
    """
    told = []
    for name, stored in effects.items():
        again = {effect.name: effect for effect in effects_of_rows(result.models[name], result.config, result.folder)}
        made = again.get(stored.name)
        if made is None:
            told.append(f"WARNING: {name}: the summary holds {stored.name}, which its rows do not give.")
        elif not all(isclose(getattr(stored, key), getattr(made, key), abs_tol=1e-9) for key in _COMPARED):
            told.append(f"WARNING: {name}: the summary holds {stored.name} as {stored}, but its rows give {made}.")
    claims = {claim.id: claim for claim in result.config.claims}
    for v in verdicts:
        if v.effect is not None and v.claim in claims:
            judged = judge(claims[v.claim], v.model, [v.effect], beside=Standing(v.tier, v.paper_model)).outcome
            if judged is not v.outcome and (judged.decided or v.outcome.decided):
                told.append(f"WARNING: {v.model}: the summary says of {v.claim} {v.outcome}, its interval {judged}.")
    return told


def rows_that_count(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of pairs that passed the gate."""
    return rows[rows["included"]] if "included" in rows else rows


def chosen_by(effect: Effect) -> str:
    """Which of its model's included rows an effect was made of."""
    return f"rows: {effect.rows.describe()}" if effect.rows else "its rows are not recorded"


def figure_metadata(result: RunResult) -> dict[str, str]:
    """What a figure is saved with (`Figure.savefig(..., metadata=...)`), so that a copy can still be explained."""
    return {FIGURE_KEY: f"{result.config.name}/{result.hash}"}


def explain(target: str | Path, results_dir: str | Path = "results") -> Explanation:
    """Explain a figure, a folder, an experiment, a model, an effect, a claim or a cell.

    Args:
        target: a path (figure or run folder), or names joined by slashes after the experiment's:
            `locality`, `locality/qwen3`, `locality/field_only.recovery`, `locality/qwen3/field_only.recovery`,
            `locality/<claim id>`; the experiment may carry its hash as `locality@3f2a`. Or the key of a cell,
            8 characters of it at least.
        results_dir: root of all results.

    Raises:
        StoreError: nothing of that kind was run.
        UnknownNameError: the run has nothing of that name; with the nearest ones.
    """
    text = str(target)
    folder = _folder_of(Path(target), Path(results_dir))
    if folder is not None:
        return _about_run(text, load_result(folder))
    experiment, _, names = text.strip("/").partition("/")
    experiment, _, wanted_hash = experiment.partition("@")
    runs = [run for run in find_runs(results_dir, experiment) if run.name.startswith(wanted_hash[:SHORT_HASH])]
    if not runs:
        if not names and (about := _about_cell(text, Path(results_dir))):
            return about
        known = sorted({run.parent.name for run in find_runs(results_dir)})
        raise UnknownNameError("finished experiment, figure or cell", text, known)
    return _about_names(text, load_result(runs[-1]), names)


def command_of(result: RunResult) -> str:
    """The command that makes a run again, from the file it came from or else from its own resolved copy."""
    config = result.config
    # Another choice of models than the file's own is only in the resolved copy, as is a file that has moved.
    source = config.source if config.source and _gives(result) else str(result.folder / CONFIG)
    profile = f" --profile {config.profile}" if config.profile and source == config.source else ""
    return f"kvprobe run {shlex.quote(source)}{profile}"


def _gives(result: RunResult) -> bool:
    try:
        return load_config(result.config.source, profile=result.config.profile).hash == result.config.hash
    except ConfigError:
        return False


def _folder_of(path: Path, results_dir: Path) -> Path | None:
    """The run folder that `path` is, lies in, or names in its figure metadata."""
    if not path.exists():
        return None
    for folder in [path, *path.absolute().parents]:
        if (folder / SUMMARY).exists():
            return folder
    named = _named_in_figure(path)
    if named is None:
        if path.is_file():
            raise StoreError(f"{path} is not a figure of kvprobe; give one that a run has written.")
        return None
    if "," in named:
        runs = ", ".join(run.partition("/")[0].strip() for run in named.split(","))
        raise StoreError(f"{path} shows several runs; explain one of them: {runs}.")
    experiment, _, run_hash = named.partition("/")
    folder = results_dir / experiment / run_hash[:SHORT_HASH]
    if not (folder / SUMMARY).exists():
        raise StoreError(f"{path} was made by the run {experiment}/{folder.name}, which is not in {results_dir}.")
    return folder


def _named_in_figure(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        with Image.open(path) as image:
            named = image.info.get(FIGURE_KEY)
    except (UnidentifiedImageError, OSError):
        return None
    return named if isinstance(named, str) else None


def _about_run(target: str, result: RunResult) -> Explanation:
    return _explanation(target, "run", result, tuple(result.models.values()), result.rows())


def _about_names(target: str, result: RunResult, name: str) -> Explanation:
    models = tuple(result.models.values())
    kind = "run"
    # A hub id has a slash of its own.
    chosen_model = next((m for m in result.models if name == m or name.startswith(f"{m}/")), None)
    if chosen_model is not None:
        models, name, kind = (result.models[chosen_model],), name[len(chosen_model) + 1 :], "model"
    rows = result.rows()
    chosen = {model.name for model in models}
    rows = rows[rows["model"].isin(chosen)] if len(rows.columns) else rows
    if not name:
        return _explanation(target, kind, result, models, rows)
    verdicts = tuple(v for v in result.verdicts if v.claim == name and v.model in chosen)
    effects = {model.name: effect for model in models for effect in model.effects if effect.name == name}
    if verdicts:
        effects = {verdict.model: verdict.effect for verdict in verdicts if verdict.effect}
    if not verdicts and not effects:
        known = {effect.name for model in models for effect in model.effects}
        known |= {verdict.claim for verdict in result.verdicts} | (set(result.models) if kind == "run" else set())
        raise UnknownNameError("model, effect or claim in this run", name, known)
    behind = _rows_of(effects, rows) if effects else rows_that_count(rows)
    kind = "claim" if verdicts else "effect"
    return _explanation(target, kind, result, models, behind, effects=effects, verdicts=verdicts)


def _rows_of(effects: Mapping[str, Effect], rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that each model's effect was made of."""
    counted = rows_that_count(rows)
    parts = [effect.rows.select(counted[counted["model"] == m]) for m, effect in effects.items() if effect.rows]
    return pd.concat(parts) if parts else counted.iloc[:0]


def _about_cell(key: str, results_dir: Path) -> Explanation | None:
    if len(key) < 8 or not all(c in "0123456789abcdef" for c in key):
        return None
    for folder in find_runs(results_dir):
        result = load_result(folder)
        for model in result.models.values():
            full = next((cell for cell in model.cells if cell.startswith(key)), None)
            if full:
                rows = result.rows()
                return _explanation(key, "cell", result, (model,), rows[rows["cell"] == full])
    return None


def _explanation(
    target: str,
    kind: str,
    result: RunResult,
    models: tuple[ModelResult, ...],
    rows: pd.DataFrame,
    *,
    effects: Mapping[str, Effect] | None = None,
    verdicts: tuple[Verdict, ...] = (),
) -> Explanation:
    return Explanation(
        target=target,
        kind=kind,
        result=result,
        models=models,
        rows=rows,
        effects=effects or {},
        verdicts=verdicts,
        command=command_of(result),
        config=result.folder / CONFIG,
    )


def _model_line(model: ModelResult) -> str:
    identity = model.identity
    named = ", ".join(
        f"{label} {str(identity[key])[:SHORT_HASH]}"
        for label, key in (
            ("weights", "weights_sha256"),
            ("configuration", "config_sha256"),
            ("tokenizer", "tokenizer_sha256"),
            ("dtype", "dtype"),
            ("attention", "attention"),
            ("device", "device"),
        )
        if key in identity
    )
    return f"{model.name} ({named or 'not loaded'}): {model.told}. {model.reason}"


def _p_line(verdict: Verdict) -> str:
    if verdict.p_value is None:
        return f" No p value: {verdict.p_reason}." if verdict.p_reason else ""
    return f" p = {verdict.p_value:.3g}."


def _history(verdict: Verdict) -> str:
    return f" The claim was {verdict.changed}." if verdict.changed else ""


def _code_line(provenance: Mapping[str, Any]) -> str:
    code = provenance.get("code", {})
    commit = code.get("commit")
    dirty = " with uncommitted changes" if code.get("dirty") else ""
    packages = ", ".join(f"{name} {version}" for name, version in sorted(provenance.get("packages", {}).items()))
    return f"code: kvprobe {code.get('version')}, {f'commit {commit}{dirty}' if commit else 'no commit'}; {packages}"
