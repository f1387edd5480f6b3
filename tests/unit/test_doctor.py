"""Every check of `kvprobe doctor` meets the world it warns of, and says the mend."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import threadpoolctl
import torch
from typer.testing import CliRunner

from kvprobe import doctor
from kvprobe.cli import doctor as _command  # noqa: F401 - registers itself
from kvprobe.cli.app import app
from kvprobe.doctor import CHECKS, Mark, Place, examine, usable_cores
from kvprobe.models import memory

Patch = pytest.MonkeyPatch


def other_version(package: str, version: str | None) -> Callable[[Patch, Path], None]:
    real = doctor._version

    def make(patch: Patch, folder: Path) -> None:
        patch.setattr(doctor, "_version", lambda name: version if name == package else real(name))

    return make


def cores(number: float) -> Callable[[Patch, Path], None]:
    return lambda patch, folder: patch.setattr(doctor, "usable_cores", lambda: number)


def set_to(place: Any, name: str, value: Any) -> Callable[[Patch, Path], None]:
    return lambda patch, folder: patch.setattr(place, name, value)


def sealed(place: str) -> Callable[[Patch, Path], None]:
    """A file stands where the folder should be, which not even root can write into."""

    def make(patch: Patch, folder: Path) -> None:
        (folder / "file").touch()
        inside = folder / "file" / "inside"
        patch.setattr(doctor, "_existing", lambda path: folder / "file" if path == inside else path)
        if place == "hub":
            patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(inside))
        elif place == "cache":
            patch.setenv("KVPROBE_CACHE", str(inside))

    return make


def broken_plugin(patch: Patch, folder: Path) -> None:
    package = folder / "ruined_plugin-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: ruined-plugin\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[kvprobe.probes]\nruined = no_such_module_anywhere\n")
    patch.syspath_prepend(str(folder))


def no_gpu_seen(patch: Patch, folder: Path) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def slow_bfloat16(patch: Patch, folder: Path) -> None:
    patch.setattr(doctor, "bfloat16_speed", lambda: 0.25)


BAD: list[tuple[str, Mark, str, Callable[[Patch, Path], None]]] = [
    ("versions", Mark.PROBLEM, r"pip install 'transformers<5.24,>=5.23'", other_version("transformers", "5.24.1")),
    ("versions", Mark.PROBLEM, r"pip install 'sae-lens<7,>=6.54'", other_version("sae-lens", None)),
    ("cache in transformers", Mark.PROBLEM, r"'transformers>=5.23,<5.24'", other_version("transformers", "5.24.0")),
    ("threads", Mark.NOTE, "export OMP_NUM_THREADS=1", cores(0.5)),
    ("threads", Mark.NOTE, "unset OMP_NUM_THREADS", cores(64.0)),
    (
        "BLAS",
        Mark.NOTE,
        "OPENBLAS_NUM_THREADS=",
        set_to(threadpoolctl, "threadpool_info", lambda: [{"internal_api": "openblas", "num_threads": 4096}]),
    ),
    ("load", Mark.NOTE, "--jobs 1", set_to(os, "getloadavg", lambda: (1e6, 0.0, 0.0))),
    ("bfloat16", Mark.NOTE, "cpu: float32", slow_bfloat16),
    ("attention", Mark.PROBLEM, "attention: eager", set_to(doctor, "attention_difference", lambda: float("nan"))),
    ("memory", Mark.NOTE, "end other programs", set_to(memory, "available_bytes", lambda device: 1e9)),
    ("memory", Mark.NOTE, "--jobs", set_to(memory, "available_bytes", lambda device: None)),
    ("GPU", Mark.NOTE, "CUDA build of torch", no_gpu_seen),
    ("hub cache", Mark.PROBLEM, "HF_HUB_CACHE", sealed("hub")),
    ("model cache", Mark.PROBLEM, "KVPROBE_CACHE", sealed("cache")),
    ("results folder", Mark.PROBLEM, "--results", sealed("results")),
    ("disk", Mark.NOTE, "--results", set_to(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))),
    ("hub access", Mark.NOTE, "unset HF_HUB_OFFLINE", set_to(huggingface_hub.constants, "HF_HUB_OFFLINE", True)),
    ("ray", Mark.NOTE, r"pip install 'kvprobe\[distributed\]'", other_version("ray", None)),
    ("vllm", Mark.NOTE, r"pip install 'kvprobe\[serving\]'", other_version("vllm", None)),
    ("torchao", Mark.NOTE, r"pip install 'kvprobe\[quantised\]'", other_version("torchao", None)),
    ("plugins", Mark.PROBLEM, "pip uninstall ruined-plugin", broken_plugin),
]


@pytest.mark.parametrize("world", BAD)
def test_a_bad_world_is_found_and_mended(tmp_path: Path, monkeypatch: Patch, world: Any) -> None:
    name, mark, mend, make_bad = world
    make_bad(monkeypatch, tmp_path)
    results = tmp_path / "file" / "inside" if name == "results folder" else tmp_path
    finding = CHECKS[name](Place(results))
    assert finding.mark is mark
    assert re.search(mend, finding.mend), finding


def test_every_check_has_a_bad_world() -> None:
    assert {name for name, *_ in BAD} == set(CHECKS)


def test_what_is_well_needs_no_mend(tmp_path: Path) -> None:
    found = dict(examine(tmp_path))
    assert list(found) == list(CHECKS)
    assert all(bool(finding.mend) == (finding.mark is not Mark.OK) for finding in found.values())
    # The machine that runs the tests is one on which kvprobe works.
    assert not {name for name, finding in found.items() if finding.mark is Mark.PROBLEM}


def test_a_check_that_breaks_is_a_problem_and_the_others_go_on(tmp_path: Path, monkeypatch: Patch) -> None:
    def broken(place: Place) -> Any:
        raise RuntimeError("no\nidea")

    monkeypatch.setitem(CHECKS, "load", broken)
    found = dict(examine(tmp_path))
    assert found["load"].mark is Mark.PROBLEM
    assert "RuntimeError: no idea" in found["load"].text
    assert len(found) == len(CHECKS)


def test_cores_follow_the_control_group(tmp_path: Path) -> None:
    own = usable_cores(tmp_path)
    for quota, expected in (("max 100000", own), ("50000 100000", 0.5), ("99900000 100000", own), ("nonsense", own)):
        (tmp_path / "cpu.max").write_text(quota)
        assert usable_cores(tmp_path) == expected


def test_the_command_says_it_in_lines_and_in_json_and_fails_only_on_problems(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    run = CliRunner().invoke
    place = ["doctor", "--results", str(tmp_path)]
    well = run(app, place)
    assert well.exit_code == 0
    assert len(well.output.splitlines()) == len(CHECKS)
    findings = json.loads(run(app, [*place, "--json"]).output)
    assert [finding["check"] for finding in findings] == list(CHECKS)
    other_version("ray", None)(monkeypatch, tmp_path)
    assert run(app, place).exit_code == 0
    broken_plugin(monkeypatch, tmp_path)
    bad = run(app, place)
    assert bad.exit_code == 1
    assert "✗ problem plugins: ruined-plugin cannot be loaded (ModuleNotFoundError" in bad.output
    assert importlib.metadata.version("ruined-plugin") == "1.0"
