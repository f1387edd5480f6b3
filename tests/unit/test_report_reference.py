"""The paper's numbers are the shipped ones, and each model is set beside the right one of them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from kvprobe.figures.panel import PaperEntry
from kvprobe.probes.mechanism.locality.reading import READING
from kvprobe.report.reference import paper_model, paper_value, paper_values
from kvprobe.runs import load_config

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "experiments" / "section3" / "locality.yaml"


@pytest.mark.parametrize(
    ("name", "architecture", "paper"),
    [
        ("qwen3-note-taker", "qwen3", "Qwen3-8B"),
        ("mistral-reader", "mistral", "Mistral-7B-v0.3"),
        ("qwen3-14b", "qwen3", "Qwen3-14B"),
        ("Qwen/Qwen3-4B", "qwen3", "Qwen3-4B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama", "Llama-3.1-8B"),
        ("gemma-2-9b-it", "gemma2", "Gemma-2-9B"),
        ("mistral-7b-instruct-v0.3", "mistral", "Mistral-7B-v0.3"),
        ("anything", "gpt2", None),
    ],
)
def test_models_of_the_paper(name: str, architecture: str, paper: str | None) -> None:
    assert paper_model(name, architecture) == paper


def test_values() -> None:
    entry = PaperEntry("locality_patch", "field_only", "decision_recovery")
    assert paper_value(entry, "Llama-3.1-8B") == -0.028
    assert paper_value(entry, "no such model") is None
    assert paper_values(READING.paper, "Qwen3-8B") == {"field_only.recovery": 0.009, "full_downstream.recovery": 1.0}
    assert paper_values(READING.paper, None) == {}


def test_the_checkout_holds_the_same_table() -> None:
    packaged = (files("kvprobe.report") / "reference.csv").read_bytes()
    assert (ROOT / "results" / "reference.csv").read_bytes() == packaged


def test_the_experiment_covers_four_families() -> None:
    families = {name.split("-")[0] for name in load_config(EXPERIMENT).models}
    assert families == {"qwen3", "llama", "gemma2", "mistral"}


def test_the_experiment_has_at_least_eight_clusters() -> None:
    config = load_config(EXPERIMENT)
    assert load_config(EXPERIMENT, profile="quick").task.parameters["size"] < config.task.parameters["size"]
    assert load_config(EXPERIMENT, models="paper").models[0] == "qwen3-8b"
