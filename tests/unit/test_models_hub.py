"""Hub ids without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from models_files import write_folder

from kvprobe.errors import ModelSourceError
from kvprobe.models.cards import list_models, model_card
from kvprobe.models.loader import load_subject
from kvprobe.models.sources import hub


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repository: str, local_files_only: bool = False, **_: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot(repository: str, local_files_only: bool = False, **_: Any) -> str:
        raise LocalEntryNotFoundError("not here") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub, "_require_reachable", lambda config: None)


def test_no_network(nothing_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def head(self, url: str, timeout: float) -> None:
            raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    with pytest.raises(ModelSourceError, match=r"Qwen/Qwen3-8B is not on this machine and .* \(Name or service"):
        load_subject("qwen3-8b")


def test_offline(nothing_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelSourceError, match=r"someone/thing is not on this machine and HF_HUB_OFFLINE is set"):
        load_subject("someone/thing")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GatedRepoError, r"accepted its licence.*hf auth login"),
        (RepositoryNotFoundError, r"knows no model 'someone/thing'"),
        (ValueError, r"someone/thing could not be downloaded \(broken\)"),
    ],
)
def test_the_hub_says_no(monkeypatch: pytest.MonkeyPatch, kind: Any, message: str) -> None:
    response = httpx.Response(403, request=httpx.Request("GET", "https://hub"))
    fail_with(monkeypatch, kind("broken") if kind is ValueError else kind("broken", response=response))
    with pytest.raises(ModelSourceError, match=message):
        load_subject("someone/thing")


def test_a_snapshot_on_disk_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "abc123"
    write_folder(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    identity = load_subject("someone/thing", device="cpu", dtype="float32").identity
    assert identity.source == "someone/thing@abc123"
    assert all(row.available for row in list_models(["paper"]))
    (folder / "model.safetensors").unlink()
    assert not any(row.available for row in list_models(["paper"]))


def test_a_model_without_adapter_is_listed_as_such(nothing_here: None) -> None:
    rows = {row.name: row for row in list_models()}
    assert rows["qwen3-8b"].supported
    assert rows["falcon-mamba-7b-instruct"].supported is False
    assert "no adapter for falcon_mamba" in model_card("falcon-mamba-7b-instruct")["supported"]
