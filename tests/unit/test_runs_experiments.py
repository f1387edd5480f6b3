"""Experiments by name, section and path, and what they share in configs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvprobe.errors import ConfigError, UnknownNameError
from kvprobe.models.catalogue import config_files, model_config
from kvprobe.runs.config import GateConfig, load_config, overlaid
from kvprobe.runs.experiments import experiment_files, known_experiments
from kvprobe.shipped import shipped, shipped_folder
from kvprobe.stats import StatisticsConfig

LOCALITY = Path("experiments/section3/locality.yaml")
SHIPPED = {file.stem: file for file in shipped_folder("experiments").rglob("*.yaml")}
OWN = {"name": "own", "probe": "locality", "models": ["a"], "task": "gated_decision"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(file: Path, **changes: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({**OWN, **changes}))
    return file


@pytest.mark.parametrize("word", ["locality", "section3", "3", "experiments/section3", str(LOCALITY)])
def test_shipped_experiments_are_found_from_anywhere(word: str, elsewhere: Path) -> None:
    files = experiment_files([word, word])
    assert LOCALITY in files
    assert (
        len(files) == len(set(files)) == (1 if "locality" in word else len(list(SHIPPED["locality"].parent.iterdir())))
    )
    assert load_config(LOCALITY).source == str(LOCALITY)


def test_a_name_is_the_name_inside_the_file() -> None:
    assert len(SHIPPED) == 49
    assert {name: load_config(name).name for name in SHIPPED} == {name: name for name in SHIPPED}


def test_an_own_experiment_goes_by_name_and_hides_a_shipped_one(elsewhere: Path) -> None:
    written(elsewhere / "experiments" / "mine" / "own.yaml")
    written(elsewhere / "experiments" / "locality.yaml", name="locality")
    assert load_config("own").models == load_config("locality").models == ["a"]
    assert set(known_experiments()) == {*SHIPPED, "own"}
    assert experiment_files(["mine"]) == [Path("experiments/mine/own.yaml")]


def test_a_folder_called_like_an_experiment_needs_a_path(elsewhere: Path) -> None:
    file = written(elsewhere / "locality" / "own.yaml")
    assert experiment_files(["locality"]) == [LOCALITY]
    assert experiment_files(["./locality"]) == [file.relative_to(elsewhere)]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("localty", "There is no experiment named 'localty'; did you mean 'locality'"),
        ("section33", "did you mean 'section3'"),
        ("none.yaml", "There is no experiment file none.yaml"),
        ("empty", "The folder empty holds no experiment"),
    ],
)
def test_what_is_not_there_is_named(word: str, expected: str, elsewhere: Path) -> None:
    (elsewhere / "empty").mkdir()
    with pytest.raises((ConfigError, UnknownNameError), match=expected):
        experiment_files([word])


def test_an_own_experiment_includes_what_ships(elsewhere: Path) -> None:
    include = ["configs/defaults.yaml", "configs/profiles/calibration.yaml"]
    file = written(elsewhere / "own.yaml", include=include, models={"paper": ["b"]})
    assert load_config(file).models == load_config("locality").models
    assert load_config(file, models="paper").models == ["b"]
    assert load_config(file, profile="calibration").models == ["micro-note-taker", "micro-reader"]
    written(elsewhere / "configs" / "defaults.yaml", models={"organisms": ["nearer"]})
    assert load_config(file).models == ["nearer"]


def test_defaults_say_what_the_schema_says() -> None:
    config = load_config("locality")
    assert config.gate == GateConfig()
    assert config.statistics == StatisticsConfig()


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_no_experiment_repeats_what_it_includes(name: str) -> None:
    own = yaml.safe_load(SHIPPED[name].read_text())
    assert not repeated(own, included(SHIPPED[name]))


def test_model_groups_name_models_that_are_known() -> None:
    groups = yaml.safe_load((shipped_folder("configs") / "defaults.yaml").read_text())["models"]
    tiers = {"organisms": "organism"}
    for group, names in groups.items():
        assert {model_config(name).tier for name in names} == {tiers.get(group, group)}


def test_the_models_of_a_checkout_are_no_second_ones(elsewhere: Path) -> None:
    (elsewhere / "configs").symlink_to(shipped_folder("configs"))
    assert "qwen3-8b" in config_files()


def included(file: Path) -> dict[str, Any]:
    """All that the includes of a file say, theirs too."""
    includes = yaml.safe_load(file.read_text()).get("include", [])
    base: dict[str, Any] = {}
    for include in [includes] if isinstance(includes, str) else includes:
        other = shipped(Path(include)) or file.parent / include
        base = overlaid(base, overlaid(included(other), yaml.safe_load(other.read_text())))
    base.pop("include", None)
    return base


def repeated(own: Any, base: Any, path: str = "") -> list[str]:
    """Dotted keys of `own` that say what `base` says already."""
    if isinstance(own, dict) and isinstance(base, dict):
        return [each for key in own.keys() & base.keys() for each in repeated(own[key], base[key], f"{path}.{key}")]
    return [path] if own == base else []
