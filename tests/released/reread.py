"""The effects and figures of released runs, read again from their rows; run as a script it tells what differs.

python -m tests.released.reread                        # all runs: effects against their summaries, filters
python -m tests.released.reread locality heads --figures OLD   # and figures against those in another results folder
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from kvprobe.figures.style import save_figure
from kvprobe.probes.base import Probe
from kvprobe.report.write import panels
from kvprobe.runs.explain import figure_metadata
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.readings import EffectsOfRows
from kvprobe.runs.results import ModelResult, RunResult, effects_of_rows, find_runs, load_result
from kvprobe.stats import Effect, Sample

RELEASED = Path(__file__).parents[2] / "results" / "released"
_SAME = 1e-9
_NUMBERS = ("estimate", "low", "high", "noise_floor", "n", "clusters", "excluded")


def read_again(result: RunResult) -> dict[str, list[Effect]]:
    """By model, the effects that today's reading makes of a run's rows."""
    return {model.name: effects_again(result.folder, model.name) for model in result.models.values() if model.effects}


@cache
def effects_again(folder: Path, model: str) -> list[Effect]:
    """The effects of one model of a stored run, read from its rows once."""
    result = load_result(folder)
    return list(effects_of_rows(result.models[model], result.config, folder))


def sample_of(result: RunResult, model: ModelResult) -> Sample:
    """The rows of one model that count."""
    rows = result.rows()
    own = rows[(rows["model"] == model.name) & rows["included"]].reset_index(drop=True)
    return Sample.of_model(own, result.config.statistics)


def differences(result: RunResult) -> Iterator[str]:
    """What the effects read again have that the stored ones have not, one line each."""
    for name, effects in read_again(result).items():
        # Only what the summary holds: the others are read from the same rows by the same code.
        stored, made = ({e.name: e for e in some} for some in (result.models[name].stored_effects, effects))
        for missing in stored.keys() - made.keys():
            yield f"{name}/{missing}: missing"
        kept = result.models[name].effects
        left_out = kept.left_out if isinstance(kept, EffectsOfRows) else 0
        if len(new := made.keys() - stored.keys()) != left_out:
            yield f"{name}: {len(new)} effects that the summary has not, {left_out} left out of it: {sorted(new)[:3]}"
        for key in stored.keys() & made.keys():
            if told := _difference(stored[key], made[key]):
                yield f"{name}/{key}: {told}"


def _difference(stored: Effect, made: Effect) -> str:
    changed = [
        f"{field} {getattr(stored, field)} -> {getattr(made, field)}"
        for field in _NUMBERS
        if not _equal(getattr(stored, field), getattr(made, field))
    ]
    changed += [
        f"{field} {getattr(stored, field)} -> {getattr(made, field)}"
        for field in ("unit", "method", "seed")
        if getattr(stored, field) != getattr(made, field)
    ]
    keys = stored.extra.keys() | made.extra.keys()
    changed += [
        f"extra {key} {stored.extra.get(key)} -> {made.extra.get(key)}"
        for key in keys
        if not _equal(stored.extra.get(key, math.nan), made.extra.get(key, math.nan))
    ]
    return ", ".join(changed)


def filter_faults(result: RunResult, only: int | None = None) -> Iterator[str]:
    """Effects that a reading of nothing but their own rows does not give again, one line each.

    Args:
        result: a run.
        only: how many different filters are tried for each model; by default all.
    """
    probe = make_probe(result.config)
    for model in result.models.values():
        if not model.effects:
            continue
        # Estimates do not depend on resamples, which take most of the time.
        sample = sample_of(result, model).resampled(999)
        by_filter: dict[str, list[Effect]] = {}
        for effect in effects_again(result.folder, model.name):
            if effect.rows is None:
                yield f"{model.name}/{effect.name}: carries no rows"
            else:
                by_filter.setdefault(json.dumps(effect.rows.to_record(), sort_keys=True), []).append(effect)
        every = max(1, len(by_filter) // only) if only else 1
        for effects in list(by_filter.values())[::every]:
            yield from _faults_of(probe, model.name, sample, effects)


def _faults_of(probe: Probe, model: str, sample: Sample, effects: list[Effect]) -> Iterator[str]:
    assert effects[0].rows is not None
    rows: pd.DataFrame = effects[0].rows.select(sample.rows)
    again = {e.name: e for e in probe.read_by().read(probe, replace(sample, rows=rows.reset_index(drop=True)))}
    for effect in effects:
        if effect.name not in again:
            yield f"{model}/{effect.name}: its {len(rows)} rows alone do not give it"
        elif not _equal(effect.estimate, again[effect.name].estimate):
            yield f"{model}/{effect.name}: {effect.estimate} from all rows, {again[effect.name].estimate} from its own"


def figure_differs(result: RunResult, other: Path) -> str:
    """Whether the SVG drawn today has other bytes than that in another results folder; empty where it has not."""
    made = {name: tuple(effects) for name, effects in read_again(result).items()}
    models = {name: replace(m, effects=made.get(name, ())) for name, m in result.models.items()}
    drawn = replace(result, models=models)
    with tempfile.TemporaryDirectory() as folder:
        figure = make_probe(result.config).read_by().draw(panels(drawn))
        svg = save_figure(figure, Path(folder) / result.config.name, figure_metadata(result))[1]
        old = other / result.config.name / result.folder.name / svg.name
        if svg.read_bytes() == old.read_bytes():
            return ""
        kept = Path(tempfile.gettempdir()) / f"{result.config.name}.svg"
        kept.write_bytes(svg.read_bytes())
        kept.with_suffix(".png").write_bytes(svg.with_suffix(".png").read_bytes())
        return f"figure differs: {kept.with_suffix('.png')} against {old.with_suffix('.png')}"


def _equal(one: Any, other: Any) -> bool:
    return bool(
        one == other or abs(one - other) <= _SAME * max(1.0, abs(one)) or (math.isnan(one) and math.isnan(other))
    )


def main() -> None:
    """Tell what differs."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("experiments", nargs="*")
    arguments.add_argument("--figures", type=Path)
    arguments.add_argument("--no-filters", action="store_true")
    asked = arguments.parse_args()
    for folder in find_runs(RELEASED):
        result = load_result(folder)
        if asked.experiments and result.config.name not in asked.experiments:
            continue
        count = sum(len(model.effects) for model in result.models.values())
        told = list(differences(result))
        told += [] if asked.no_filters else list(filter_faults(result))
        told += [line for line in ([figure_differs(result, asked.figures)] if asked.figures else []) if line]
        print(f"{result.config.name}: {count} effects, {len(told)} differences")
        print("".join(f"    {line}\n" for line in told[:40]), end="")


if __name__ == "__main__":
    main()
