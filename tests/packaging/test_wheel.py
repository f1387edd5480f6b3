"""What a user without a checkout has: a wheel from the tree, installed where the checkout cannot be seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"kvprobe": "kvprobe", "configs": "kvprobe/configs", "experiments": "kvprobe/experiments"}
"""Folders of the checkout, and where they are in the wheel."""
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds kvprobe, and sees everything else where the tests have it."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, *requirement: str) -> Environment:
        call(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        new = cls(folder)
        packages = new.python("import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        # Only a site directory's own .pth files count, so an editable kvprobe among these packages is not found.
        Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        pip("--python", new.bin / "python", "install", "--no-deps", "--no-index", "--no-build-isolation", *requirement)
        return new

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    def kvprobe(self, *arguments: str) -> str:
        return call(self.bin / "kvprobe", *arguments, cwd=self.folder)

    def python(self, code: str) -> str:
        return call(self.bin / "python", "-c", code, cwd=self.folder)


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command that knows nothing of the checkout but `cwd`. Returns its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "COV"))}
    environment = {**kept, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path) -> None:
    call(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def built(source: Path, into: Path) -> Path:
    """The wheel made from a source tree or an sdist."""
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", into, source)
    (wheel,) = into.glob("kvprobe-*.whl")
    return wheel


def files_in(wheel: Path) -> set[str]:
    return {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}


def files_of(folders: Sequence[str]) -> set[str]:
    """The files of the checkout's folders, by their place in the wheel."""
    found = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file())
    kept = (file.relative_to(ROOT) for file in found if "__pycache__" not in file.parts)
    return {"/".join((FOLDERS[file.parts[0]], *file.parts[1:])) for file in kept}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.create(tmp_path_factory.mktemp("installed"), str(wheel))


def test_the_wheel_holds_code_configs_and_experiments(wheel: Path) -> None:
    assert files_in(wheel) == files_of(list(FOLDERS))


def test_an_sdist_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path)
    (sdist,) = tmp_path.glob("kvprobe-*.tar.gz")
    assert files_in(built(sdist, tmp_path)) == files_in(wheel)


def test_an_editable_install_reads_the_checkout(tmp_path: Path) -> None:
    editable = Environment.create(tmp_path, "--editable", str(ROOT))
    found = editable.python("from kvprobe.shipped import *; print(*map(shipped_folder, FOLDERS), sep='\\n')").split()
    assert [Path(folder) for folder in found] == [ROOT / "configs", ROOT / "experiments"]


def test_an_installed_kvprobe_is_not_the_checkout(installed: Environment) -> None:
    listed = installed.kvprobe("list", "experiments")
    assert {"locality", "unified_agent"} <= {line.split()[0] for line in listed.splitlines() if line.strip()}
    place = Path(installed.python("import kvprobe; print(kvprobe.__file__)").strip())
    assert place.is_relative_to(installed.folder)
    assert not place.is_relative_to(ROOT)


IN_ONE_PROCESS = """
from pathlib import Path
from typer.testing import CliRunner
from kvprobe.cli import audit, look, run
from kvprobe.cli.app import app

def said(*arguments):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.stdout

print(said("run", "locality", "--models", "qwen3-note-taker", "--profile", "quick", "--jobs", "1"))
print(said("explain", "locality/qwen3-note-taker/field_only.recovery"))
Path("prompt.yaml").write_text(said("audit", "--example"))
said("audit", "prompt.yaml", "--page", "audit.html", "--json", "audit.json")
exec(Path("example.py").read_text())
"""


def test_it_runs_an_experiment_an_audit_and_the_first_example_of_the_documentation(installed: Environment) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), flags=re.DOTALL)
    (installed.folder / "example.py").write_text(blocks[0])
    shown = installed.python(IN_ONE_PROCESS)
    assert "both-are-the-donor" in shown
    assert "rows behind it" in shown
    assert "tokens were run" in shown
    (summary,) = (installed.folder / "runs" / "locality").glob("*/summary.json")
    assert json.loads(summary.read_text())["source"] == "experiments/section3/locality.yaml"
    assert json.loads((installed.folder / "audit.json").read_text())["fields"]
    assert "</html>" in (installed.folder / "audit.html").read_text()
