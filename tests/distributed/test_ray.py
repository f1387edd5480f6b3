"""Real Ray: two nodes on this machine, workers and nodes lost in mid-run, and the bytes of an in-process run.

As a script, `python test_ray.py RESULTS`, it runs a section on a Ray of its own; a test interrupts it.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

UNIT = Path(__file__).parents[1] / "unit"
sys.path.insert(0, str(UNIT))

import section_fakes  # noqa: E402
from section_fakes import PAUSE, contents, experiment, group_is_gone, load_subject  # noqa: E402

import kvprobe  # noqa: E402
from kvprobe.cli import doctor  # noqa: E402, F401 - they register themselves
from kvprobe.cli.app import app  # noqa: E402
from kvprobe.errors import ConfigError, UnknownNameError, UnsupportedError, WorkerLostError  # noqa: E402
from kvprobe.models.config import Resources, read_model_config  # noqa: E402
from kvprobe.runs import SectionResult, cluster, events, executors, provenance, ray_resources, run_section  # noqa: E402
from kvprobe.runs.events import Tracker  # noqa: E402
from kvprobe.runs.results import Status  # noqa: E402

SETTINGS = {
    "PYTHONPATH": os.pathsep.join([str(UNIT), str(Path(kvprobe.__file__).parents[1])]),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers step back behind all else on a machine, and would hardly begin on one where other tests run.
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
needs_ray = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fixed_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("source_hash", "code_version"):
        monkeypatch.setattr(provenance, name, getattr(provenance, name))
    section_fakes.fix_provenance()


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a cluster of two nodes with so many cores each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvprobe[distributed]'")
    from ray.cluster_utils import Cluster

    made: list[Any] = []

    def make(cores: int = 1, seconds_a_cell: float = 0.0) -> Any:
        for name, value in {**SETTINGS, PAUSE: str(seconds_a_cell)}.items():
            monkeypatch.setenv(name, value)
        made.append(Cluster(initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False}))
        made[0].add_node(num_cpus=cores)
        return made[0]

    yield make
    ray.shutdown()
    for one in made:
        one.shutdown()


def run(results: Path, configs: list[Any], address: str | None, **arguments: Any) -> SectionResult:
    return section_fakes.run(results, configs, 1, executor="ray", ray_address=address, **arguments)


def logged(results: Path, what: str) -> list[str]:
    lines = [line for log in results.rglob("log.jsonl") for line in log.read_text().splitlines()]
    return [entry["cell"] for entry in map(json.loads, lines) if entry["event"] == what]


@needs_ray
def test_two_nodes_change_no_byte_and_a_killed_worker_costs_its_cell(
    tmp_path: Path, two_nodes: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = two_nodes()
    deaths = tmp_path / "deaths"
    configs = [experiment("blocks", parameters={"kill": str(deaths)}), experiment("other", task=task(seed=1))]
    seen: list[events.Event] = []
    spread = run(tmp_path / "ray", configs, nodes.address, on_event=seen.append)
    assert deaths.read_text() == "x"  # a worker did die, once, and its cell was measured again
    whole = section_fakes.run(tmp_path / "whole", configs, 1)
    assert not spread.failed
    assert [result.verdicts for result in spread.results] == [result.verdicts for result in whole.results]
    assert contents(tmp_path / "ray") == contents(tmp_path / "whole")
    measured = logged(tmp_path / "ray", "cell")
    assert len(measured) == len(set(measured)) == 12
    fractions = [event.fraction for event in seen if isinstance(event, events.Progress)]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    # What no node has is told at once, for its model only, and says what there is.
    greedy = Resources(num_gpus=4)
    real = cluster.needs_of
    monkeypatch.setattr(cluster, "needs_of", lambda name, n: greedy if name == "blue" else real(name, n))
    began = time.monotonic()
    short = run(tmp_path / "short", [experiment("blocks", models=["blue"])], nodes.address)
    assert time.monotonic() - began < 20
    (model,) = short.results[0].models.values()
    assert model.status is Status.FAILED
    assert "blue needs 4 GPU, and no node of the Ray cluster has that" in model.reason
    assert "1 CPU" in model.reason
    assert "change 'resources' in the model's YAML" in model.reason


def task(**changes: Any) -> dict[str, Any]:
    return {"name": "gated_decision", "size": 12, "split": "all", **changes}


@needs_ray
@pytest.mark.slow
def test_a_cell_that_kills_every_worker_fails_alone(tmp_path: Path, two_nodes: Callable[..., Any]) -> None:
    deaths = tmp_path / "deaths"
    fatal = {"kill": str(deaths), "times": executors.RETRIES + 1}
    config = experiment("doomed", parameters=fatal, block_size=12)
    section = run(tmp_path / "ray", [config], two_nodes().address)
    models = section.results[0].models
    assert len(deaths.read_text()) == executors.RETRIES + 1
    assert models["red"].status is Status.MEASURED
    assert models["blue"].status is Status.FAILED
    assert models["blue"].failures == (f"Block 0: {executors.LOST}",)
    # The same command measures what is left, and nothing else.
    again = run(tmp_path / "ray", [config], None)
    assert not again.failed
    assert len(logged(tmp_path / "ray", "cell")) == 2


@needs_ray
@pytest.mark.slow
def test_a_node_removed_in_mid_run_changes_no_byte(tmp_path: Path, two_nodes: Callable[..., Any]) -> None:
    nodes = two_nodes(cores=2, seconds_a_cell=0.5)
    (leaving,) = nodes.worker_nodes
    configs = [experiment(name, task=task(size=40, seed=seed)) for seed, name in enumerate(("one", "two"))]
    began = threading.Event()

    def watch(event: events.Event) -> None:
        if isinstance(event, events.CellFinished):
            began.set()

    def remove() -> None:
        assert began.wait(200)
        nodes.remove_node(leaving, allow_graceful=False)

    remover = threading.Thread(target=remove)
    remover.start()
    section = run(tmp_path / "ray", configs, nodes.address, on_event=watch)
    remover.join()
    assert not section.failed
    assert leaving not in nodes.worker_nodes
    section_fakes.run(tmp_path / "whole", configs, 1)
    assert contents(tmp_path / "ray") == contents(tmp_path / "whole")
    measured = logged(tmp_path / "ray", "cell")
    assert len(measured) == len(set(measured)) == 2 * 2 * 10


def start(results: Path, seconds: float = 0.0) -> subprocess.Popen[bytes]:
    # A Ray of its own keeps a token in the user's home.
    environment = {**os.environ, **SETTINGS, PAUSE: str(seconds), "HOME": str(results.parent)}
    return subprocess.Popen([sys.executable, __file__, str(results)], env=environment, start_new_session=True)


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_keeps_finished_cells(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvprobe[distributed]'")
    cut = start(tmp_path, 1.0)
    deadline = time.monotonic() + 200
    while len(logged(tmp_path, "cell")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(cut.pid, signal.SIGINT)  # as a terminal does
    assert cut.wait(60) == 130
    assert group_is_gone(cut.pid, 60)
    kept = logged(tmp_path, "cell")
    assert 2 <= len(kept) < 12
    assert not list(tmp_path.rglob("summary.json"))
    with start(tmp_path) as rest:
        pass
    assert rest.returncode == 0
    measured = logged(tmp_path, "cell")
    assert len(measured) == len(set(measured)) == 12


def test_without_ray_the_mend_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"pip install 'kvprobe\[distributed\]'"), cluster.connected(None):
        pass


@needs_ray
def test_an_address_where_nobody_answers_is_told() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvprobe[distributed]'")
    with (
        pytest.raises(ConfigError, match=r"No Ray cluster answers at nonsense://x.*--ray-address"),
        cluster.connected("nonsense://x"),
    ):
        pass


def test_places_are_counted_node_by_node() -> None:
    node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0, "memory": 64.0 * 2**30, "a100": 1.0}}
    nodes = [node, node, {**node, "Alive": False}]
    assert ray_resources.places_on(nodes, Resources(num_gpus=1, num_cpus=1)) == 8
    assert ray_resources.places_on(nodes, Resources(num_gpus=0.5, num_cpus=4)) == 4
    assert ray_resources.places_on(nodes, Resources(num_cpus=8, memory="60GiB")) == 2
    assert ray_resources.places_on(nodes, Resources(custom={"a100": 1})) == 2
    assert ray_resources.places_on(nodes, Resources(num_cpus=9)) == 0
    assert ray_resources.places_on(nodes, Resources(custom={"h200": 1})) == 0


def test_a_worker_with_other_packages_refuses_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    there = cluster._versions()
    assert cluster._misfit(there) == ""
    told = cluster._misfit({**there, "torch": "1.0"})
    assert "torch is" in told
    assert "and not 1.0" in told
    monkeypatch.setattr(provenance, "source_hash", lambda: "another")
    assert "kvprobe's source is another and not source" in cluster._misfit(there)


def test_paper_models_take_a_gpu_and_small_ones_their_memory() -> None:
    paper, small = ray_resources.needs_of("qwen3-8b", 4), ray_resources.needs_of("smollm2-135m", 4)
    assert (paper.num_gpus, paper.num_cpus, paper.memory) == (1, 1, 0)
    assert (small.num_gpus, small.num_cpus) == (0, 4)
    assert small.memory is not None
    assert small.memory > ray_resources.PROCESS_BYTES


def test_resources_of_a_yaml_are_read_and_nonsense_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    head = "tier: paper\nsource: hub\nhub_id: some/big\n"
    file.write_text(head + "resources: {num_gpus: 2, num_cpus: 4, memory: 60GiB, custom: {h100: 1}}\n")
    read = read_model_config(file).resources
    assert (read.num_gpus, read.num_cpus, read.memory, read.custom) == (2, 4, 60 * 2**30, {"h100": 1})
    for wrong, named in (("{gpus: 1}", "resources.gpus"), ("{memory: lots}", "resources.memory")):
        file.write_text(f"{head}resources: {wrong}\n")
        with pytest.raises(ConfigError, match=named):
            read_model_config(file)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--executor", "ray", "--jobs", "2"], "--jobs counts processes of this machine"),
        (["--ray-address", "auto"], "--ray-address needs --executor ray"),
        (["--executor", "dask"], "'dask' is not one of"),
    ],
)
def test_options_that_do_not_fit_are_told(options: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["run", "locality", *options])
    assert done.exit_code != 0
    assert told in " ".join(done.output.replace("│", " ").split())


def test_errors_of_workers_travel_whole() -> None:
    for error in (UnknownNameError("model", "qwen3-8", ["qwen3-8b"]), WorkerLostError("Gone.")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))


def test_progress_of_models_side_by_side_never_goes_back() -> None:
    seen: list[float] = []
    tracker = Tracker(4, lambda event: seen.append(event.fraction) if isinstance(event, events.Progress) else None)
    for model in ("a", "b"):
        tracker((1, model), events.ModelStarted(model, 1, 2))
        tracker((1, model), events.ModelReady(model, 30, 0, 3, 0))
    for model, block in (("a", 0), ("b", 0), ("b", 1), ("a", 1), ("b", 2)):
        tracker((1, model), events.CellAdvanced(model, block, 0.5))
        tracker((1, model), events.CellFinished(model, block, "key", 1, 1.0))
    tracker((1, "b"), events.ModelFinished("b", "measured", ""))
    tracker((1, "a"), events.ModelFinished("a", "failed", "its last cell is missing"))
    assert seen[-1] == 0.5
    for model in ("a", "b"):
        tracker((2, model), events.ModelStarted(model, 1, 2))
        tracker((2, model), events.ModelFinished(model, "not applicable", ""))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def main() -> None:
    section_fakes.fix_provenance()
    configs = [experiment(name, task=task(seed=seed)) for seed, name in enumerate(("one", "two"))]
    place = {"executor": "ray", "ray_address": "local", "start_worker": section_fakes.fix_provenance}
    try:
        run_section(configs, results_dir=sys.argv[1], load_subject=load_subject, **place)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
