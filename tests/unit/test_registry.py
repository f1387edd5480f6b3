"""Registries: what is found without an import, what third parties add, and names that clash."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kvprobe import registry
from kvprobe.errors import UnknownNameError
from kvprobe.registry import KINDS, Kind, Registry, describe

OWN = '''
from things_package.base import THINGS

@THINGS.register("first")
class First:
    """The first thing.

    More about it.
    """
'''
BASE = """
from kvprobe.registry import Kind, Registry

THINGS = Registry(Kind("thing", "THINGS", "things_package"))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with one kind of plugin and one plugin, which is gone afterwards."""
    folder = tmp_path / "things_package"
    folder.mkdir()
    for name, text in {"__init__": "", "base": BASE, "first": OWN, "broken": "raise ImportError"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    registry._definitions.cache_clear()
    registry._entry_points.cache_clear()
    for name in [name for name in sys.modules if name.startswith("things_package")]:
        del sys.modules[name]


def things() -> Registry[Any]:
    from things_package.base import THINGS  # type: ignore[import-not-found]

    return THINGS  # type: ignore[no-any-return]


def test_describing_imports_nothing(package: Path) -> None:
    assert describe(Kind("thing", "THINGS", "things_package")) == {"first": "The first thing."}
    assert things().describe() == {"first": "The first thing."}
    assert things().names() == ["first"]
    assert "things_package.first" not in sys.modules
    assert things().get("first").__name__ == "First"
    # A module that is broken spoils itself alone.
    assert "things_package.broken" not in sys.modules


def test_what_is_registered_while_python_runs_is_known_too(package: Path) -> None:
    @things().register("second")
    class Second:
        """Another."""

    assert things().get("second") is Second
    assert things().describe() == {"first": "The first thing.", "second": "Another."}
    with pytest.raises(UnknownNameError, match="did you mean 'second'"):
        things().get("secnd")


def test_the_name_of_a_plugin_that_is_not_imported_is_taken(package: Path) -> None:
    with pytest.raises(ValueError, match="two things are named 'first'"):
        things().register("first")(type("Other", (), {}))
    assert things().get("first").__name__ == "First"


def test_a_plugin_is_found_again_after_a_registry_was_put_back(package: Path) -> None:
    first = things().get("first")
    things()._entries.clear()
    assert things().get("first") is first


def test_two_files_may_not_share_a_name(package: Path) -> None:
    (package / "again.py").write_text(OWN)
    with pytest.raises(ValueError, match=r"two things are named 'first': in things_package\.again and .*first"):
        things().names()


def test_a_name_must_be_written_out(package: Path) -> None:
    (package / "first.py").write_text(OWN.replace('"first"', "NAME"))
    with pytest.raises(ValueError, match="write out the name under which First is registered"):
        things().names()


def test_third_parties_add_names_through_an_entry_point(package: Path) -> None:
    (package.parent / "theirs.py").write_text(OWN.replace("first", "theirs").replace("First", "Theirs"))
    metadata = package.parent / "theirs-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[kvprobe.things]\ntheirs = theirs\n")
    registry._entry_points.cache_clear()
    assert len(entry_points(group="kvprobe.things")) == 1
    assert describe(Kind("thing", "THINGS", "things_package")) == {
        "first": "The first thing.",
        "theirs": "The theirs thing.",
    }
    assert things().get("theirs").__name__ == "Theirs"
    del sys.modules["theirs"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_kvprobes_own_plugins_are_found_and_say_what_they_are(kind: Kind) -> None:
    described = describe(kind)
    assert len(described) >= 3
    assert all(described.values())
