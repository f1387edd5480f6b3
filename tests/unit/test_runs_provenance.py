"""What a record says of its code."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvprobe
from kvprobe.runs import provenance
from kvprobe.runs.preparation import Cell, labelled


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A little package in the place of kvprobe."""
    root = tmp_path / "repository" / "kvprobe"
    for name in ("__init__.py", "engine/sweep.py", "report/figures.py", "tasks/data/skeletons.yaml", "cli/app.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.setattr(provenance, "ROOT", root)
    forget()
    yield root
    forget()


def forget() -> None:
    provenance.source_hash.cache_clear()
    provenance.code_version.cache_clear()


@pytest.mark.parametrize(
    ("file", "matters"),
    [
        ("engine/sweep.py", True),
        ("tasks/data/skeletons.yaml", True),
        ("report/figures.py", False),
        ("cli/app.py", False),
    ],
)
def test_only_code_that_can_change_a_row_invalidates_it(package: Path, file: str, matters: bool) -> None:
    before = provenance.source_hash()
    (package / file).write_text("changed")
    (package / "README.md").write_text("new")
    provenance.source_hash.cache_clear()
    assert (provenance.source_hash() != before) is matters


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_and_dirty_flag_of_a_checkout(package: Path) -> None:
    assert provenance.code_version()["commit"] is None
    git(package.parent, "init")
    (package.parent / ".gitignore").write_text("kvprobe\n")
    git(package.parent, "add", ".gitignore")
    git(package.parent, "commit", "-m", "somebody else's repository, in which kvprobe is installed")
    forget()
    assert provenance.code_version()["commit"] is None
    git(package.parent, "add", "--force", "kvprobe")
    git(package.parent, "commit", "-m", "kvprobe")
    forget()
    clean = provenance.code_version()
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (package / "cli/app.py").write_text("changed")
    forget()
    assert provenance.code_version() == {**clean, "dirty": True}


def test_a_key_depends_on_content_not_on_order() -> None:
    assert provenance.cell_key({"a": 1, "b": [1, 2]}) == provenance.cell_key({"b": [1, 2], "a": 1})
    assert provenance.cell_key({"a": 1}) != provenance.cell_key({"a": 2})


def test_a_plugins_own_source_counts() -> None:
    assert provenance.plugin_hash(Cell("m", 0, 0, (), {}, "k")) != "unknown"
    assert provenance.plugin_hash(SimpleNamespace()) in {"unknown", provenance.plugin_hash(SimpleNamespace())}


@pytest.mark.parametrize("row", [{}, {"pair": 1}, {"pair": -1}, {"pair": "0"}])
def test_rows_must_say_which_pair_they_are_of(row: dict[str, object]) -> None:
    pair = SimpleNamespace()
    with pytest.raises(ValueError, match="index into the pairs"):
        labelled([row], Cell("m", 0, 0, (pair,), {}, "k"))  # type: ignore[arg-type]


def test_what_ships_with_kvprobe_is_told_by_its_place_in_the_package() -> None:
    package = Path(kvprobe.__file__).parent
    shipped = SimpleNamespace(identity=SimpleNamespace(source=str(package / "organisms" / "weights" / "one")))
    assert provenance.identity_record(shipped)["source"] == "kvprobe/organisms/weights/one"
    own = SimpleNamespace(identity=SimpleNamespace(source="/home/somebody/model"))
    assert provenance.identity_record(own)["source"] == "/home/somebody/model"
