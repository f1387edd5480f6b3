"""A plugin that is defined in a notebook: its cell stands for its source file, and may be run again."""

from __future__ import annotations

import linecache
import sys
from typing import Any

import pytest

from kvprobe.registry import Kind, Registry
from kvprobe.runs.provenance import plugin_hash

CELL = "class Own:\n    '''One line.'''\n    def measure(self):\n        return {}\n"


def defined(source: str, module: str = "__main__") -> Any:
    """The class that a cell defines, its lines known to Python as Jupyter makes them known."""
    name = f"<cell {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": module}
    exec(compile(source, name, "exec"), names)
    return names["Own"]


def test_the_hash_is_that_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in Jupyter, where no file stands behind the main module.
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    first, same, other = (plugin_hash(defined(CELL.format(value))()) for value in (1, 1, 2))
    assert first == same != other
    assert "unknown" not in {first, other}


def test_a_cell_may_be_run_again() -> None:
    registry: Registry[Any] = Registry(Kind("thing", "NOTHING", "kvprobe.html"))
    registry.register("own")(defined(CELL.format(1)))
    again = defined(CELL.format(2))
    registry.register("own")(again)
    assert registry.get("own") is again


def test_two_modules_may_not_share_a_name() -> None:
    registry: Registry[Any] = Registry(Kind("thing", "NOTHING", "kvprobe.html"))
    registry.register("own")(defined(CELL.format(1), "a"))
    for module in ("a", "b", "__main__"):
        with pytest.raises(ValueError, match="two things"):
            registry.register("own")(defined(CELL.format(1), module))
