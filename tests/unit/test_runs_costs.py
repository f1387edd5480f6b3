"""Predicted costs against what the models themselves say: parameters, cached bytes, tokens run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from kvprobe.cli import models as _commands  # noqa: F401 - registers itself
from kvprobe.cli.app import app
from kvprobe.engine.forward import flops, prefill
from kvprobe.errors import ConfigError
from kvprobe.models.catalogue import model_config
from kvprobe.models.loader import load_subject
from kvprobe.models.memory import count_parameters
from kvprobe.runs.config import load_config
from kvprobe.runs.costs import (
    Work,
    cache_bytes_per_token,
    counted_work,
    counting,
    flops_of,
    paper_tier_costs,
    text_config,
)

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-70b-instruct", "gemma-2-9b-it", "deepseek-v2-lite-chat"])
def test_a_shape_has_as_many_parameters_as_the_model(name: str) -> None:
    config = model_config(name)
    parameters = count_parameters(AutoConfig.for_model(config.architecture, **config.shape))
    assert config.memory_gb is not None
    assert 2 * parameters == pytest.approx(config.memory_gb * 1e9, rel=0.02)


@pytest.mark.parametrize("name", ["qwen3-note-taker", "gemma2-note-taker"])
def test_tokens_flops_and_bytes_are_those_of_a_real_prefill(name: str) -> None:
    subject = load_subject(name)
    own = subject.model.config.to_dict()
    model = model_config("qwen3-8b").model_copy(
        update={"shape": {key: own[key] for key in own if key != "model_type"}, "architecture": own["model_type"]}
    )
    length = 50
    with counting() as seen:
        cache = prefill(subject, list(range(5, 5 + length))).cache
    assert seen == {"tokens": length * subject.layers, "attended": length * length * subject.layers}
    stored = sum(part.numel() for layer in cache.layers for part in (layer.keys, layer.values))
    assert cache_bytes_per_token(model) * length == 2 * stored
    work = Work(length, length * length)
    logits = subject.architecture.flops_per_logits(subject.config)
    engine = flops(subject, length, subject.layers * length * length, length) - logits
    assert flops_of(model, work) == engine
    layers, heads = subject.layers, subject.config.num_attention_heads
    for grows, times in (("layers", layers), ("heads", layers * heads)):
        assert flops_of(model, replace(work, grows=grows)) == times * engine


def test_nothing_is_counted_outside_the_block() -> None:
    subject = load_subject("qwen3-note-taker")
    with counting() as seen:
        pass
    with torch.no_grad():
        prefill(subject, [5, 6, 7])
    assert seen == {"tokens": 0.0, "attended": 0.0}


def test_hours_follow_the_share_and_work_adds_up() -> None:
    both = [load_config(EXPERIMENTS / "section3" / f"{name}.yaml", models="paper") for name in ("locality", "heads")]
    costs = [{one.model: one for one in paper_tier_costs(part, 1e15, 0.1)[0]} for part in (both, both[:1], both[1:])]
    half = paper_tier_costs(both, 1e15, 0.05)[0]
    for one in half:
        whole = costs[0][one.model]
        assert one.hours == pytest.approx(2 * whole.hours)
        assert whole.flops == pytest.approx(costs[1][one.model].flops + costs[2][one.model].flops)
        assert whole.memory > whole.weights
    assert costs[1]["gemma-2-9b-it"].flops > costs[1]["mistral-7b-instruct-v0.3"].flops > 0


def test_all_experiments_were_counted() -> None:
    names = {load_config(file).name for file in EXPERIMENTS.glob("section[3-6]/*.yaml")}
    # The organisms have no tokens to write a call with.
    assert names - set(counted_work()) <= {"tool_calls"}
    assert set(counted_work()) <= names
    assert all(work.tokens > 0 and work.attended >= work.tokens for work in counted_work().values())


def test_models_without_a_shape_are_named_and_wrong_shapes_refused() -> None:
    config = load_config(EXPERIMENTS / "section3" / "locality.yaml", models="qwen3-32b-fp8,qwen3-8b")
    found, unknown = paper_tier_costs([config], 1e15, 0.1)
    assert ([one.model for one in found], unknown) == (["qwen3-8b"], ["qwen3-32b-fp8"])
    with pytest.raises(ConfigError, match="'qwen3-32b-fp8' has no key 'shape'"):
        text_config(model_config("qwen3-32b-fp8"))


def test_the_command_tells_its_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file = str(EXPERIMENTS / "section3" / "locality.yaml")
    told = CliRunner().invoke(app, ["models", "cost", file, "--models", "qwen3-8b,qwen3-32b-fp8", "--share", "0.2"])
    assert told.exit_code == 0, told.output
    assert "qwen3-8b" in told.output
    assert "at 0.2 of 989 TFLOPS" in told.output
    assert "gives no shape: qwen3-32b-fp8" in told.output
