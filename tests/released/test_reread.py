"""The comparison of released effects with their rows can fail."""

from __future__ import annotations

from dataclasses import replace

from kvprobe.runs.readings import EffectsOfRows
from kvprobe.runs.results import find_runs, load_result
from kvprobe.stats import Effect
from tests.released.reread import RELEASED, differences


def test_an_altered_summary_is_told() -> None:
    result = load_result(find_runs(RELEASED, "locality")[0])
    name, model = next((name, model) for name, model in result.models.items() if model.stored_effects)
    first, *others = model.stored_effects
    moved = replace(first, estimate=first.estimate + 0.1, high=first.high + 0.2)

    def told(*effects: Effect) -> set[str]:
        stored = EffectsOfRows(effects, len(model.effects) - len(model.stored_effects), lambda: effects)
        return set(differences(replace(result, models={name: replace(model, effects=stored)})))

    before = told(first, *others)
    assert [line.split(":")[0] for line in told(moved, *others) - before] == [f"{name}/{first.name}"]
    assert told(*others) - before
