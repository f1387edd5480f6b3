"""`import kvprobe`: instant, lazy, and the same objects whatever is imported before."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvprobe

ROOT = Path(__file__).parents[2]


def in_a_new_python(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); import kvprobe; dir(kvprobe); kvprobe.__version__\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(*sorted(loaded))"
    )
    assert in_a_new_python(code).stdout.split() == ["kvprobe", "lazy_loader"]


def test_import_takes_less_than_300_milliseconds() -> None:
    code = "import time; start = time.perf_counter(); import kvprobe; print(time.perf_counter() - start)"
    assert min(float(in_a_new_python(code).stdout) for _ in range(3)) < 0.3


def test_all_names_are_what_the_stub_says() -> None:
    stub = ast.parse(Path(kvprobe.__file__).with_suffix(".pyi").read_text())
    listed = {
        alias.asname: each.module for each in stub.body if isinstance(each, ast.ImportFrom) for alias in each.names
    }
    assert sorted(listed) == sorted(kvprobe.__all__) == dir(kvprobe)
    for name, module in listed.items():
        assert getattr(kvprobe, name) is getattr(importlib.import_module(f"kvprobe.{module}"), name)


def test_no_name_is_that_of_a_package_or_module() -> None:
    assert not set(kvprobe.__all__) & {module.name for module in pkgutil.iter_modules(kvprobe.__path__)}


def test_submodules_do_not_take_the_place_of_names() -> None:
    code = (
        "import pkgutil, importlib, kvprobe\n"
        "for module in pkgutil.iter_modules(kvprobe.__path__):\n"
        "    if module.name != '__main__': importlib.import_module(f'kvprobe.{module.name}')\n"
        "print(*(name for name in kvprobe.__all__ if type(getattr(kvprobe, name)).__name__ == 'module'))"
    )
    assert not in_a_new_python(code).stdout.strip()


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="kv_patch"):
        _ = kvprobe.kv_patch
    with pytest.raises(ImportError):
        exec("from kvprobe import kv_patch")
