"""Commands: help with an example, errors as one sentence, exit codes, nothing heavy for help."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_fakes import finished_run
from section_fakes import experiment
from typer.testing import CliRunner, Result

from kvprobe.cli import audit, look, main, models, organisms, run
from kvprobe.cli.app import app
from kvprobe.cli.live import LiveRun, time_left
from kvprobe.runs import SectionResult, events, rehearsal

COMMANDS = [
    ["run"],
    ["list"],
    ["show"],
    ["explain"],
    ["report"],
    ["models"],
    ["models", "list"],
    ["models", "pull"],
    ["models", "card"],
    ["organisms"],
    ["organisms", "list"],
    ["organisms", "train"],
    ["organisms", "evaluate"],
    ["organisms", "card"],
    [],
]
ROOT = Path(__file__).parents[2]
EXPERIMENT = str(ROOT / "experiments" / "section3" / "locality.yaml")
assert look
assert models
assert organisms


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(command: list[str]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert f"Example: kvprobe {' '.join(command)}".rstrip() in result.output


def test_models_of_every_tier_are_listed() -> None:
    result = call("models", "list")
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    for name in ("qwen3-note-taker", "micro-reader", "smollm2-135m", "llama-3.1-8b-instruct"):
        assert name in lines


@pytest.mark.parametrize("arguments", ["--help", "--version", "list", "list claims", "models list"])
def test_what_only_tells_loads_nothing_heavy(arguments: str) -> None:
    code = (
        f"import sys; from kvprobe.cli import main; sys.argv = ['kvprobe', *'{arguments}'.split()]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "nowhere.yaml"], "There is no experiment file nowhere.yaml"),
        (["run", "localty"], "There is no experiment named 'localty'; did you mean 'locality'"),
        (["run", EXPERIMENT, "--profile", "huge"], "there is no profile 'huge'; known: full, quick"),
        (["run", EXPERIMENT, "--models", "smollm2-135", "--dry-run"], "did you mean 'smollm2-135m'"),
        (["models", "card", "gemma3-270"], "did you mean 'gemma3-270m'"),
        (["models", "pull", "./nothing.gguf"], "There is no file or folder nothing.gguf"),
        (["show", "localty"], "did you mean 'locality'"),
        (["explain", "locality"], "There is no finished experiment, figure or cell named 'locality'"),
        (["report", "empty"], "empty holds no finished run"),
    ],
)
def test_an_error_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    result = call(*arguments)
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["list", "nonsense"], ["run"], ["nonsense"], ["organisms", "train"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_ctrl_c_exits_with_130_and_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvprobe.runs.run_section", interrupted)
    result = call("run", EXPERIMENT, "--models", "qwen3-8b", "--results", str(tmp_path))
    assert result.exit_code == 130
    assert "is kept in" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_ctrl_c_elsewhere_exits_with_130_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvprobe.models.cards.model_names", interrupted)
    assert call("models", "list").exit_code == 130


def test_an_interrupt_before_anything_is_loaded_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvprobe.cli.audit":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, audit.__name__)
    monkeypatch.delattr("kvprobe.cli.audit")
    monkeypatch.setattr(sys, "meta_path", [Stop(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


def test_an_interrupt_that_a_library_swallows_while_it_loads_still_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallowed(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError

    monkeypatch.setattr("kvprobe.models.cards.model_names", swallowed)
    before = signal.getsignal(signal.SIGINT)
    stopped = call("models", "list")
    assert (stopped.exit_code, "Interrupted" in stopped.stderr, "Traceback" in stopped.output) == (130, True, False)
    assert signal.getsignal(signal.SIGINT) is before


def test_lists_name_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    output = call("list").output
    for name in ("locality", "gated_decision", "own_prompt", "manual", "smollm2-135m"):
        assert name in output
    assert "locality/field-alone-does-nothing" in call("list", "claims").output


def test_one_broken_experiment_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "broken.yaml").write_text("nme: x")
    (tmp_path / "experiments" / "good.yaml").write_text(Path(EXPERIMENT).read_text())
    monkeypatch.chdir(tmp_path)
    result = call("list", "experiments")
    assert "Does a changed field" in result.stdout
    assert "broken.yaml" in result.stderr


def test_a_dry_run_shows_the_cells_and_measures_nothing(tmp_path: Path) -> None:
    results = tmp_path / "runs"
    result = call("run", EXPERIMENT, "--models", "qwen3-8b,gemma-2-9b-it", "--dry-run", "--results", str(results))
    assert result.exit_code == 0
    assert "24 cells" in result.output
    assert not results.exists()


def test_a_dry_run_shows_one_cell_a_model_where_a_probe_needs_all_pairs(tmp_path: Path) -> None:
    together = experiment("together", probe="test_together", models=["qwen3-8b", "gemma-2-9b-it"])
    file = tmp_path / "together.yaml"
    file.write_text(together.to_yaml())
    result = call("run", str(file), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "2 cells" in result.output
    row = next(line for line in result.output.splitlines() if "qwen3-8b" in line)
    assert row.split() == ["qwen3-8b", "12", "1"]


PLUGIN = """
from kvprobe import PROBES, Probe
from kvprobe.probes.mechanism.locality.probe import Locality
from kvprobe.probes.mechanism.locality.reading import READING


@PROBES.register("in_one_file")
class InOneFile(Locality):
    reading = READING
"""


@pytest.mark.slow
def test_a_probe_in_one_file_runs_in_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nprobe: in_one_file\nmodels: [micro-note-taker, micro-reader]\n"
        "task: {name: gated_decision, size: 8, split: held_out, wordings: [manual]}\n"
        "claims:\n  - {id: notes, kind: critique, statement: downstream_only.recovery > 0.85}\n"
    )
    run = ["run", str(tmp_path / "mine.yaml"), "--results", str(tmp_path / "r"), "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", *run, "--plugin", str(tmp_path / "mine.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("measured") == 2
    for name, said in (
        ("none.py", "There is no Python file"),
        ("bad.py", r"cannot be used as a plugin \(ValueError: no\)"),
    ):
        (tmp_path / "bad.py").write_text("raise ValueError('no')")
        failed = call(*run, "--plugin", str(tmp_path / name))
        assert failed.exit_code == 1
        assert re.search(said, " ".join(failed.stderr.split()))


def test_a_dry_run_foresees_memory_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def foresee(plan: Any, name: str, load: Any) -> rehearsal.Forecast:
        if name == "gemma-2-9b-it":
            return rehearsal.Forecast(name, 0, None, None, 0, "It is not here.")
        return rehearsal.Forecast(name, 90, 2_500_000_000, 3725.0, 2)

    monkeypatch.setattr(rehearsal, "forecast", foresee)
    result = call(
        "run",
        EXPERIMENT,
        "--models",
        "qwen3-8b,gemma-2-9b-it",
        "--dry-run",
        "--rehearse",
        "--results",
        str(tmp_path / "r"),
    )
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if "qwen3-8b" in line)
    assert "2.50 GB" in row
    assert "1 h 2 min" in row
    assert "gemma-2-9b-it: It is not here." in result.output
    assert not (tmp_path / "r").exists()


def test_looking_at_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = finished_run(tmp_path, monkeypatch)
    for target in ("locality", str(finished.folder)):
        shown = call("show", target, "--results", str(tmp_path), "--effects")
        assert "fails" in shown.output
        assert "shapley_field.recovery" in shown.output
    rows = tmp_path / "rows.csv"
    told = call("explain", "locality/red/field_only.recovery", "--results", str(tmp_path), "--csv", str(rows))
    assert told.exit_code == 0
    assert "24 rows behind it" in told.output
    assert len(rows.read_text().splitlines()) == 25
    assert call("report", str(tmp_path)).exit_code == 0
    assert (tmp_path / "report.md").is_file()
    assert call("report", str(finished.folder)).exit_code == 0


def test_a_run_with_a_failed_model_exits_with_1_and_still_shows_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = finished_run(tmp_path, monkeypatch)
    monkeypatch.setattr("kvprobe.runs.run_section", lambda *_, **__: SectionResult("section3", (finished,)))
    result = call("run", EXPERIMENT, "--models", "qwen3-8b", "--results", str(tmp_path))
    assert result.exit_code == 1
    assert "holds" in result.stdout
    assert "locality.png" in result.stdout
    assert "failed" in result.stderr


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (4.2, "4 s left"), (200, "3 min 20 s left"), (7300, "2 h 1 min left")]
)
def test_time_left(seconds: float | None, text: str) -> None:
    assert time_left(seconds) == text


def test_the_live_line_takes_every_event() -> None:
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    with LiveRun(Console(file=out, width=120, force_terminal=True, color_system=None)) as live:
        live(events.RunStarted("e", "h", "there", 1, 2, 2))
        live(events.ModelStarted("m", 1, 1))
        live(events.ModelReady("m", 2, 0, 2, 1, 740_000_000))
        live(events.Progress("m", 0, 0.5, 65.0))
        live(events.CellFinished("m", 0, "k", 3, 0.1))
        live(events.CellFailed("m", 1, "It broke."))
        live(events.Warned("A cell was damaged."))
        live(events.ModelFinished("m", "failed", "why"))
        live(events.RunInterrupted(1, 2))
    assert live.folder == "there"
    for text in ("It broke.", "A cell was damaged.", "m (1 of 1): failed", "1 of 2 cells", "up to 0.74 GB"):
        assert text in out.getvalue()


def test_the_live_line_of_a_section_counts_experiments() -> None:
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    with LiveRun(Console(file=out, width=120, force_terminal=True, color_system=None)) as live:
        live(events.SectionStarted("section3", 2, 2))
        live(events.RunStarted("first", "h", "there", 1, 2, 2))
        live(events.ModelStarted("m", 1, 1))
        live(events.ModelFinished("m", "measured", "why"))
        live(events.Progress("m", 0, 0.5, 65.0))
        live(events.ExperimentFinished("first", 1, 2, 3.2))
        live(events.ExperimentFinished("second", 2, 2, 0.0, "It broke."))
    for text in ("2 experiments, 2 models at a time", "1 of 2  first, 3 s", "2 of 2  second failed: It broke."):
        assert text in out.getvalue()
    # One line an experiment; its models are told in the table at the end.
    assert "m (1 of 1)" not in out.getvalue()
    assert not live.folder


def test_results_go_to_a_folder_git_ignores() -> None:
    assert f"/{run.RESULTS}/" in (ROOT / ".gitignore").read_text().splitlines()


GOOD = {"accuracy": 0.99, "field_only": 0.02, "downstream_only": 0.97}


@pytest.mark.parametrize(
    ("kind", "measured", "missed"),
    [
        ("note-taker", GOOD, 0),
        ("note-taker", GOOD | {"accuracy": 0.97}, 1),
        ("note-taker", GOOD | {"field_only": float("nan")}, 1),
        ("note-taker", GOOD | {"field_only": 0.9, "downstream_only": 0.1}, 2),
        ("reader", GOOD | {"field_only": 0.9}, 0),
        ("reader", GOOD, 1),
    ],
)
def test_what_an_organism_misses(kind: str, measured: dict[str, float], missed: int) -> None:
    assert len(organisms.misses(organisms.OrganismKind(kind), measured)) == missed


@pytest.mark.parametrize(("accuracy", "code"), [(0.99, 0), (0.9, 1)])
def test_training_says_when_an_organism_misses(
    accuracy: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprobe.organisms.training import Progress

    def trained(family, kind, out, *, seed, without, on_progress):  # type: ignore[no-untyped-def]
        on_progress(Progress(20, 0, 4, 1.0, {"direct": 0.5}, 61.0))
        card = {"name": f"{family}-{kind}", "seed": seed, "measured": GOOD | {"accuracy": accuracy}}
        out.mkdir()
        (out / "card.json").write_text(json.dumps(card))
        return card

    monkeypatch.setattr("kvprobe.organisms.recipes.train_organism", trained)
    out = tmp_path / "mine"
    result = call("organisms", "train", "--family", "qwen3", "--out", str(out), "--seed", "3")
    assert result.exit_code == code, result.output
    assert "qwen3-note-taker" in result.stdout
    assert ("accuracy is 0.900, not 0.98 to 1" in result.stderr) == bool(code)
