"""Experiment files: what is read, and the one sentence for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from kvprobe.errors import ConfigError
from kvprobe.runs.config import ExperimentConfig, load_config, overlaid
from kvprobe.runs.validation import validated

GOOD = {
    "name": "locality",
    "probe": "locality",
    "models": ["a", "b"],
    "task": {"name": "gated_decision", "size": 12},
    "claims": [{"id": "local", "kind": "critique", "statement": "field_only.recovery < 0.15"}],
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
        ({"modles": ["a"]}, "'modles' is not a known key; did you mean 'models'?"),
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
    config = load_config(written(tmp_path, {**GOOD, "profiles": {"quick": {"block_size": 3}}}), profile="quick")
    copy = load_config(written(tmp_path, config.to_yaml(), "copy.yaml"))
    assert copy.hash == config.hash


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
