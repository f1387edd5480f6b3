"""What the tests of the documentation share: a folder for each page, and registries as they were before."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from blocks import generator


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; what a page registers is gone afterwards."""
    registries = [getattr(importlib.import_module(module), name) for module, name in generator().REGISTRIES.values()]
    for registry in registries:
        registry.names()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path
