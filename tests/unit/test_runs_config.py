"""Experiment files: what is read, and the one sentence for what is wrong."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from kvprobe.errors import ConfigError, KvprobeError
from kvprobe.runs.config import ExperimentConfig, load_config, overlaid
from kvprobe.runs.experiments import known_experiments
from kvprobe.runs.preparation import check_model_names, make_plan, make_probe, make_task
from kvprobe.runs.validation import validated

CLAIM = {"id": "local", "kind": "critique", "statement": "field_only.recovery < 0.15"}
GOOD = {
    "name": "locality",
    "probe": "locality",
    "models": ["a", "b"],
    "task": {"name": "gated_decision", "size": 12},
    "claims": [CLAIM],
}


def written(folder: Path, content: object, name: str = "experiment.yaml") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def message(path: Path, **arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, **arguments)
    text = str(caught.value)
    assert str(path.parent) in text
    assert "\n" not in text
    return text


def test_a_good_file_is_read(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, GOOD))
    assert config.models == ["a", "b"]
    assert config.task.name == "gated_decision"
    assert config.task.parameters == {"size": 12}
    assert config.statistics.confidence == 0.95


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"modles": ["a"]}, "'modles' is not a known key; did you mean 'models'"),
        ({"statistics": {"confidense": 0.9}}, "'statistics.confidense' is not a known key; did you mean 'confidence'?"),
        ({"gate": {"oracle_accuracy": 2}}, "'gate.oracle_accuracy' is wrong"),
        ({"claims": [{"id": "x", "statement": "a < b"}]}, "'claims[0].statement' is wrong: cannot read the statement"),
        ({"claims": [{"id": "x"}]}, "the key 'claims[0].statement' is missing"),
        ({"claims": [{"id": "x", "statement": "a < 1"}]}, "the key 'claims[0].kind' is missing; add it, one of: paper"),
        (
            {"claims": [{"id": "x", "kind": "paper", "statement": "a < 1", "paper_values": {"qwen3-8b": 2}}]},
            "'claims[0]' is wrong: the paper's own value 2 for qwen3-8b violates 'a < 1'",
        ),
        ({"claims": [{"id": "x", "statement": "a < 1", "sorce": "s"}]}, "did you mean 'source'?"),
        ({"claims": [{"id": "x", "statement": "a < 1"}] * 2}, "the claim id 'x' stands twice"),
        ({"models": ["a", "a"]}, "the model 'a' stands twice"),
        ({"claims": [{**CLAIM, "models": ["b", "c"]}]}, "'claims[0].models' names 'c', which is no model of the exp"),
        (
            {"claims": [{**CLAIM, "paper_values": {"qwen3-9b": 0}}]},
            "'qwen3-9b', which is no model of the experiment; did",
        ),
        ({"section": "3/1"}, "'section' is wrong"),
        ({"name": "x" * 300}, "'name' is wrong"),
        ({"statistics": {"resamples": 10**12}}, "'statistics.resamples' is wrong"),
        ({"models": []}, "'models' is wrong"),
        ({"name": "../up"}, "'name' is wrong"),
        ({"task": {"size": 3}}, "the key 'task.name' is missing"),
        ({"block_size": "many"}, "'block_size' is wrong"),
        ({"source": "elsewhere"}, "'source' is not a known key"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_file_key_and_mend(
    tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    assert expected in message(written(tmp_path, {**GOOD, **change}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [unclosed", "is not valid YAML"),
        ("name: a\nname: b\n", "the key 'name' stands twice"),
        ("claims:\n- id: a\n  id: b\n", "the key 'id' stands twice"),
        ("- a\n- b\n", "must be keys with values, not list"),
        ("", "must be keys with values, not NoneType"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_what_is_not_an_experiment(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message(written(tmp_path, text))


def test_missing_and_binary_files(tmp_path: Path) -> None:
    assert "there is no such file" in message(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "byte 1 is not UTF-8" in message(binary)


def test_profiles_lay_keys_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {**GOOD, "profiles": {"quick": {"task": {"size": 2}}}})
    assert load_config(path).task.parameters["size"] == 12
    assert load_config(path, profile="full").task.parameters["size"] == 12
    quick = load_config(path, profile="quick")
    assert quick.task.parameters["size"] == 2
    assert quick.task.name == "gated_decision"
    assert quick.hash != load_config(path).hash
    assert "no profile 'quack'; known: full, quick" in message(path, profile="quack")


def test_model_groups(tmp_path: Path) -> None:
    path = written(tmp_path, {**GOOD, "models": {"organisms": ["a"], "paper": ["b", "c"]}})
    assert load_config(path).models == ["a"]
    assert load_config(path, models="paper").models == ["b", "c"]
    assert load_config(path, models="x, y").models == ["x", "y"]
    assert load_config(path, models=["z"]).models == ["z"]


def test_includes_are_relative_and_the_own_keys_win(tmp_path: Path) -> None:
    (tmp_path / "defaults").mkdir()
    written(tmp_path / "defaults", {"gate": {"oracle_accuracy": 0.7, "minimum_pairs": 3}}, "gate.yaml")
    path = written(tmp_path, {**GOOD, "include": "defaults/gate.yaml", "gate": {"minimum_pairs": 9}})
    gate = load_config(path).gate
    assert (gate.oracle_accuracy, gate.minimum_pairs) == (0.7, 9)
    assert "circle" in message(written(tmp_path, {"include": "experiment.yaml"}))


def test_the_resolved_copy_is_the_same_experiment(tmp_path: Path) -> None:
    claim = {**CLAIM, "models": ["b"]}
    config = load_config(
        written(tmp_path, {**GOOD, "claims": [claim], "profiles": {"quick": {"block_size": 3}}}),
        profile="quick",
        models="a",
    )
    again = load_config(written(tmp_path, config.to_yaml(), "copy.yaml"))
    assert again.hash == config.hash
    assert again.claims == config.claims


def test_hash_depends_on_content_not_on_place(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert load_config(written(tmp_path, GOOD)).hash == load_config(written(tmp_path / "elsewhere", GOOD)).hash
    assert ExperimentConfig(**GOOD).hash != ExperimentConfig(**{**GOOD, "block_size": 3}).hash  # type: ignore[arg-type]
    # What is claimed changes no measurement.
    assert ExperimentConfig(**GOOD).hash == ExperimentConfig(**{**GOOD, "claims": []}).hash  # type: ignore[arg-type]


def test_thinking_is_off_unless_asked_for() -> None:
    assert ExperimentConfig(**GOOD).chat_arguments == {"enable_thinking": False}  # type: ignore[arg-type]
    assert ExperimentConfig(**GOOD, chat=False).chat_arguments is None  # type: ignore[arg-type]
    asked = ExperimentConfig(**GOOD, chat={"enable_thinking": True})  # type: ignore[arg-type]
    assert asked.chat_arguments == {"enable_thinking": True}


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fractions: list[float] = [0.5]


def test_plugin_parameters_get_the_same_sentences() -> None:
    with pytest.raises(ConfigError, match=r"f.yaml: 'parameters.fraction' is not a known key; .* 'fractions'"):
        validated(_Parameters, {"fraction": 1}, where="f.yaml", prefix="parameters")
    with pytest.raises(ConfigError, match=r"'parameters.fractions\[0\]' is wrong: .* \(it is 'x'\)"):
        validated(_Parameters, {"fractions": ["x"]}, where="f.yaml", prefix="parameters")
    with pytest.raises(ConfigError, match=r"'parameters' is wrong"):
        validated(_Parameters, 3, where="f.yaml", prefix="parameters")


trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


@given(trees, trees)
def test_merging(base: dict[str, object], over: dict[str, object]) -> None:
    result = overlaid(base, over)
    assert set(result) == set(base) | set(over)
    assert overlaid(result, over) == result
    assert overlaid(base, {}) == base
    assert overlaid({}, over) == over


ODD_NUMBERS = [-1, 0, 1, 99999999, 2**63 - 1, 1.5, 1e308]
ODD_TEXTS = ["", " ", "x" * 300, "~nouser/x", "/nothere", "../x", "\0", "\x1b[31m", "[/INST]", "*", "skeleton"]
ODD_PARTS = [[], {}, [[]], [{}], ["a", "a"], [None], [-1], [99999999], [3, 1], {"a": 1}, {"": {}}]
ODD = st.sampled_from([None, True, *ODD_NUMBERS, *ODD_TEXTS, *ODD_PARTS])


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values inside a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield (*here, key)
        yield from paths(inner, (*here, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """`value` with `new` at a place inside it."""
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put(changed[path[0]], path[1:], new)
    return changed


@cache
def whole(file: Path) -> dict[str, Any]:
    """A shipped experiment with all parameters of its task and its probe written out, few pairs and two claims."""
    config = load_config(file)
    values = yaml.safe_load(config.to_yaml())
    task, probe = make_task(config), make_probe(config)
    values["task"] = {"name": config.task.name, **task.model_dump(mode="json")}
    values["parameters"] = probe.model_dump(mode="json")
    values["claims"] = values["claims"][:2]
    if "size" in values["task"]:
        values["task"]["size"] = 4
    return values


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_any_value_anywhere_is_taken_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    values = whole(data.draw(st.sampled_from(list(known_experiments().values()))))
    changed = put(values, data.draw(st.sampled_from(list(paths(values)))), data.draw(ODD))
    path = written(tmp_path_factory.getbasetemp(), yaml.safe_dump(changed, allow_unicode=True), "odd.yaml")
    started = time.process_time()
    try:
        config = load_config(path)
        check_model_names(config)
        make_plan(config)
        assert time.process_time() - started < 1
        assert load_config(written(path.parent, config.to_yaml(), "copy.yaml")).hash == config.hash
    except KvprobeError as error:
        told = str(error)
        assert time.process_time() - started < 1
        assert "\n" not in told


def test_a_prompt_file_is_looked_up_beside_the_experiment(tmp_path: Path) -> None:
    written(tmp_path, {"prompt": "origin: {{foreign|poor}}\nDecide.", "answers": {"old": "a", "new": "b"}}, "mine.yaml")
    config = load_config(written(tmp_path, {**GOOD, "task": {"name": "own_prompt", "files": ["mine.yaml"]}}))
    (pair,) = make_task(config).prompt_pairs()
    assert pair.scenario.skeleton == "mine"
    assert load_config(written(tmp_path, config.to_yaml(), "copy.yaml")).hash == config.hash
