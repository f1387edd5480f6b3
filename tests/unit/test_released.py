"""The released runs are whole, told by places that exist everywhere, and made of the experiments that are here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvprobe.runs import find_runs, load_config, load_result
from kvprobe.runs.explain import explain
from kvprobe.runs.results import SUMMARY, Status

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "results" / "released"
RUNS = find_runs(RELEASED)
EXPERIMENTS = sorted(ROOT.glob("experiments/section[3456]/*.yaml"))


def test_every_experiment_was_run_once() -> None:
    assert sorted(run.parent.name for run in RUNS) == sorted(file.stem for file in EXPERIMENTS)


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.parent.name)
def test_a_released_run_is_whole(folder: Path) -> None:
    result = load_result(folder)
    assert result.config.profile is None
    assert result.altered == ""
    assert not result.provenance["code"]["dirty"]
    assert all(model.status is not Status.FAILED for model in result.models.values())
    for model in result.models.values():
        assert not Path(str(model.identity["source"])).is_absolute()
    counted = {model.name: len(model.stored_effects) for model in result.models.values() if model.effects}
    rows = result.rows()
    assert counted == {} or set(counted) <= set(rows["model"])
    assert (ROOT / result.config.source).is_file()
    assert "/tmp/" not in json.dumps(json.loads((folder / SUMMARY).read_text()))


def test_a_released_number_can_be_traced() -> None:
    explanation = explain("locality/qwen3-note-taker/field_only.recovery", RELEASED)
    assert len(explanation.rows)
    assert "experiments/section3/locality.yaml" in explanation.command


@pytest.mark.slow
@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.parent.name)
def test_a_released_run_is_of_the_experiment_as_it_is_now(folder: Path) -> None:
    """When this fails the experiment was changed since: `make released`."""
    result = load_result(folder)
    assert load_config(ROOT / result.config.source).hash == result.hash
