"""From a figure or a number back to its rows, its configuration and the command that makes it again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image, UnidentifiedImageError

from kvprobe.errors import ConfigError, StoreError, UnknownNameError
from kvprobe.runs.claims import Verdict
from kvprobe.runs.config import load_config
from kvprobe.runs.results import CONFIG, SUMMARY, ModelResult, RunResult, find_runs, load_result
from kvprobe.runs.store import SHORT_HASH
from kvprobe.stats import Effect

FIGURE_KEY = "kvprobe"
_OF_THE_PAIR = frozenset({"experiment", "model", "pair", "pair_id", "skeleton", "cell", "included"})
"""Columns that say which pair a row was measured on, after which no effect is named."""


@dataclass(frozen=True)
class Explanation:
    """Where something comes from.

    Args:
        target: what was asked about.
        kind: `run`, `model`, `effect`, `claim` or `cell`.
        result: the run it belongs to.
        models: the models concerned.
        rows: the measurements behind it; for effects only those that count and that the effect is named after.
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
            *(f"{name}: {effect} ({effect.method})" for name, effect in self.effects.items()),
            *(f"{v.model}: {v.statement}: {v.outcome}. {v.reason}" for v in self.verdicts),
            *(_model_line(model) for model in self.models),
            _code_line(result.provenance),
        ]


class NamedRows:
    """Finds, among the rows of one model that count, those that an effect is named after.

    Each part of a dotted name is looked for as a value of a column (`field_only` is an intervention), then as a number
    of one (`of_layer_3`), then as a flag or a measurement (`chosen`, `margin`), each column once; a part that chooses
    nothing, as in an effect computed from others, is passed over.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows
        names = [str(column) for column in rows]
        own = [name for name in names if name not in _OF_THE_PAIR and not name.startswith("scenario_")]
        self._words = {column: set(map(str, _words(rows[column]))) for column in own}
        self._numbers = {column for column in own if pd.api.types.is_numeric_dtype(rows[column])}
        self._chosen: dict[tuple[str, str], np.ndarray] = {}

    def of(self, effect: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """The places of the effect's rows, and by what they were chosen, such as `intervention is field_only`.

        Where nothing is chosen, these are the places of all rows.
        """
        places, used, by = np.ones(len(self.rows), dtype=bool), set[str](), []
        parts = effect.split(".")
        for number, part in enumerate(parts, 1):
            for column, kind, value in self._candidates(part, is_last=number == len(parts)):
                if column in used or not (narrowed := places & self._mask(column, kind, value)).any():
                    continue
                places = narrowed
                used.add(column)
                by.append(f"{column} is {value}" if kind != "measured" else f"{column} was measured")
                break
        return np.flatnonzero(places), tuple(by)

    def _candidates(self, part: str, *, is_last: bool) -> Iterator[tuple[str, str, str]]:
        """Columns that a part of a name may speak of, as (column, kind, value)."""
        yield from ((column, "word", part) for column, words in self._words.items() if part in words)
        if numbered := re.fullmatch(r"(.+)_(\d+)", part):
            named = (c for c in self._words if f"_{numbered[1]}".endswith(f"_{c}"))
            yield from ((column, "number", numbered[2]) for column in named if column in self._numbers)
        if part in self._words and not self._words[part]:
            # The last part is what was measured: the share of a flag is a share of all rows, not of the flagged.
            flag = not is_last and set(self.rows[part].dropna().unique()) <= {True, False}
            yield part, *(("flag", "true") if flag else ("measured", ""))

    def _mask(self, column: str, kind: str, value: str) -> np.ndarray:
        if (column, value) not in self._chosen:
            values = self.rows[column]
            if kind == "measured":
                mask = values.notna()
            elif kind == "number":
                mask = values.eq(float(value))
            else:
                mask = values.eq(value if kind == "word" else True)
            self._chosen[column, value] = mask.fillna(value=False).to_numpy(dtype=bool)
        return self._chosen[column, value]


def rows_that_count(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of pairs that passed the gate."""
    return rows[rows["included"]] if "included" in rows else rows


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
        return load_config(result.config.source, profile=result.config.profile).hash == result.hash
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
            raise StoreError(f"{path} is not one of kvprobe's figures; give one that a run has made.")
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
    """The rows of each model that its effect is named after."""
    parts = []
    for model, effect in effects.items():
        named = NamedRows(rows_that_count(rows[rows["model"] == model]))
        parts.append(named.rows.iloc[named.of(effect.name)[0]])
    return pd.concat(parts)


def _words(values: pd.Series) -> Iterator[object]:
    """The different words of a column; none where it holds numbers."""
    if not (pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values)):
        yield from (value for value in values.dropna().unique() if isinstance(value, str))


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
            ("tokenizer", "tokenizer_sha256"),
            ("dtype", "dtype"),
            ("attention", "attention"),
            ("device", "device"),
        )
        if key in identity
    )
    return f"{model.name} ({named or 'not loaded'}): {model.status}. {model.reason}"


def _code_line(provenance: Mapping[str, Any]) -> str:
    code = provenance.get("code", {})
    commit = code.get("commit")
    dirty = " with uncommitted changes" if code.get("dirty") else ""
    packages = ", ".join(f"{name} {version}" for name, version in sorted(provenance.get("packages", {}).items()))
    return f"code: kvprobe {code.get('version')}, {f'commit {commit}{dirty}' if commit else 'no commit'}; {packages}"
