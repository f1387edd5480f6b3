"""The locality experiment from the command line to a figure, on random models with the organisms' tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from typer.testing import CliRunner, Result

from kvprobe.cli import look, run
from kvprobe.cli.app import app
from kvprobe.models.catalogue import organism_names
from kvprobe.organisms.families import organism_config
from kvprobe.runs import Outcome, RunResult, Status, find_runs, load_config, load_result
from kvprobe.tasks.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "experiments" / "section3" / "locality.yaml"
RELAXED = {"oracle_accuracy": 0.0, "answer_mass": 0.0, "noise_floor": 0.0, "minimum_pairs": 1}
assert look
assert run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with random models; random ones decide some pairs rightly by chance."""
    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    folders = {}
    for family in ("mistral", "gemma2"):
        config = organism_config(family, len(tokenizer))
        config.initializer_range = 0.2
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
        folders[family] = tmp_path_factory.mktemp("models") / f"{family}-random"
        model.save_pretrained(folders[family])
        tokenizer.save_pretrained(folders[family])
    return folders


def experiment(folder: Path, model: Path, size: int = 30, **changes: Any) -> Path:
    """The locality experiment on another model, smaller, and with a gate that lets chance through unless told."""
    content = yaml.safe_load(EXPERIMENT.read_text())
    content |= {"models": [str(model)], "gate": RELAXED, **changes}
    content["task"]["size"] = size
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def the_run(results: Path) -> RunResult:
    (folder,) = find_runs(results)
    return load_result(folder)


def written(results: Path) -> dict[str, bytes]:
    """Everything in the results but the logs, whose times may differ."""
    files = (file for file in results.rglob("*") if file.is_file() and file.name != "log.jsonl")
    return {str(file.relative_to(results)): file.read_bytes() for file in files}


def test_a_changed_configuration_is_measured_anew(tmp_path: Path, models: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(models["mistral"], tmp_path / "model"))
    file, results = experiment(tmp_path, folder, 4), tmp_path / "runs"
    rows = []
    for theta in (1e6, 1e6, 100.0):
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = theta
        (folder / "config.json").write_text(json.dumps(config))
        assert call("run", file, "--results", results).exit_code == 0
        run = the_run(results)
        rows.append((run.models[str(folder)].cells, run.rows().drop(columns="cell").to_csv()))
    assert rows[0] == rows[1]
    assert set(rows[0][0]).isdisjoint(rows[2][0])
    assert rows[0][1] != rows[2][1]


def test_prompts_beyond_a_models_positions_are_not_measured(tmp_path: Path, models: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(models["mistral"], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    call("run", experiment(tmp_path, folder, 4), "--results", tmp_path / "runs")
    told = the_run(tmp_path / "runs").models[str(folder)]
    assert told.status == Status.NOT_APPLICABLE
    assert "model has 32 positions and a token would stand at position" in told.reason
    assert "Nothing was measured." in told.reason


def test_from_yaml_to_verdicts_and_a_figure_and_again(tmp_path: Path, models: dict[str, Path]) -> None:
    file, results = experiment(tmp_path, models["mistral"]), tmp_path / "runs"
    first = call("run", file, "--results", results)
    assert first.exit_code == 0, first.output
    result = the_run(results)
    (model,) = result.models.values()
    assert model.status is Status.MEASURED
    assert model.gate is not None
    assert model.gate.excluded == model.effect("field_only.recovery").excluded
    assert model.effect("blast_radius.before").high == 0.0
    # The transplanted cache is bit-equal (a law of the engine); rows of one batch agree to rounding only.
    assert model.effect("no_op.error").high <= max(model.effect("noise.margin").high, 1e-4)
    assert model.effect("full_downstream.recovery").estimate == pytest.approx(1.0, abs=1e-4)
    assert Outcome.FAILS not in {v.outcome for v in result.verdicts if v.claim == "both-are-the-donor"}
    assert "mistral-random" in first.stdout
    assert str(result.folder / "locality.png") in first.stdout.replace("\n", "")
    assert (result.folder / "locality.svg").is_file()

    before = written(results)
    cells = sorted((result.folder / "cells").glob("*.json"))
    cells[0].unlink()
    cells[1].with_suffix(".parquet").write_bytes(b"half-writ")
    for name in ("rows.parquet", "summary.json", "locality.png"):
        (result.folder / name).unlink()
    second = call("run", file, "--results", results)
    assert second.exit_code == 0, second.output
    assert "is damaged" in second.stderr
    assert written(results) == before


def test_a_model_at_chance_is_not_applicable(tmp_path: Path, models: dict[str, Path]) -> None:
    file, results = experiment(tmp_path, models["gemma2"], size=6, gate={}), tmp_path / "runs"
    done = call("run", file, "--results", results)
    assert done.exit_code == 0, done.output
    result = the_run(results)
    assert {verdict.outcome for verdict in result.verdicts} == {Outcome.NOT_APPLICABLE}
    assert result.effects == {str(models["gemma2"]): []}
    assert (result.folder / "locality.png").is_file()
    assert "not applicable" in done.stdout


def test_own_prompts_that_do_not_align_are_told(tmp_path: Path, models: dict[str, Path]) -> None:
    prompt = tmp_path / "prompt.yaml"
    prompt.write_text(
        "name: mine\nprompt: 'The order status is {{pending|shipped returned}}. Reply with cancel or deny.'\n"
        "answers: {old: cancel, new: deny}\n"
    )
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"name: mine\nprobe: locality\nmodels: {models['mistral']}\ntask: {{name: own_prompt, files: [{prompt}]}}\n"
    )
    done = call("run", file, "--results", tmp_path / "runs")
    assert done.exit_code == 1
    assert "'pending' is 1 tokens and" in done.stderr
    assert len(done.stderr.strip().splitlines()[-1]) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopped_in_mid_run_it_goes_on_to_the_same_bytes(
    sent: signal.Signals, code: int, tmp_path: Path, models: dict[str, Path]
) -> None:
    file = experiment(tmp_path, models["mistral"], block_size=3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [sys.executable, "-c", "from kvprobe.cli import main; main()", "run", str(file), "--results"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(whole)], env=environment, check=True, capture_output=True)
    process = subprocess.Popen([*command, str(parts)], env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(parts.rglob("cells/*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(sent)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    if sent is signal.SIGINT:
        assert "is kept in" in told
        assert "Traceback" not in told
    assert not list(parts.rglob("summary.json"))
    subprocess.run([*command, str(parts)], env=environment, check=True, capture_output=True)
    assert written(parts) == written(whole)


@pytest.mark.slow
@pytest.mark.skipif(not organism_names(), reason="no organisms ship with this checkout")
def test_the_shipped_organisms_reproduce_the_claims(tmp_path: Path) -> None:
    wanted = [name for name in load_config(EXPERIMENT).models if name in organism_names()]
    done = call("run", EXPERIMENT, "--profile", "quick", "--models", ",".join(wanted), "--results", tmp_path)
    assert done.exit_code == 0, done.output
    assert {verdict.outcome for verdict in the_run(tmp_path).verdicts} == {Outcome.HOLDS}
