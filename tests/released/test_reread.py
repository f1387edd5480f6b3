"""The comparison of released effects with their rows can fail."""

from __future__ import annotations

from dataclasses import replace

from kvprobe.runs.results import find_runs, load_result
from tests.released.reread import RELEASED, differences


def test_an_altered_summary_is_told() -> None:
    result = load_result(find_runs(RELEASED, "locality")[0])
    name, model = next((name, model) for name, model in result.models.items() if model.stored_effects)
    first, *others = model.stored_effects
    moved = replace(first, estimate=first.estimate + 0.1, high=first.high + 0.2)
    altered = replace(result, models={name: replace(model, effects=(moved, *others))})
    only = replace(result, models={name: model})
    before = set(differences(only))
    told = set(differences(replace(altered, models={name: altered.models[name]}))) - before
    assert [line.split(":")[0] for line in told] == [f"{name}/{first.name}"]
    missing = replace(result, models={name: replace(model, effects=tuple(others))})
    assert set(differences(missing)) - before
