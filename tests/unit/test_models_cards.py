"""The list and the cards of models."""

from __future__ import annotations

from pathlib import Path

import pytest
from models_files import write_organism

from kvprobe.errors import UnknownNameError
from kvprobe.models import catalogue
from kvprobe.models.cards import list_models, model_card, pull_model
from kvprobe.models.files import sha256_of


@pytest.fixture
def organism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalogue, "organism_folder", lambda: tmp_path / "shipped")
    write_organism(tmp_path / "shipped" / "fly", accuracy=0.99, licence="Apache-2.0")
    return tmp_path / "shipped" / "fly"


def test_organisms_come_first(organism: Path) -> None:
    rows = list_models()
    assert (rows[0].name, rows[0].tier, rows[0].available, rows[0].supported) == ("fly", "organism", True, True)
    tiers = [row.tier for row in rows]
    assert tiers == sorted(tiers, key=["organism", "micro", "pocket", "paper"].index)
    assert {row.tier for row in list_models(["pocket"])} == {"pocket"}


def test_an_organisms_card_holds_its_own(organism: Path) -> None:
    card = model_card("fly")
    assert card["accuracy"] == 0.99
    assert card["licence"] == "Apache-2.0"
    assert card["sha256"] == sha256_of(organism / "model.safetensors")
    assert card["attention"] == "sdpa"


@pytest.mark.parametrize("name", [row.name for row in list_models()])
def test_every_model_has_a_card(name: str) -> None:
    card = model_card(name)
    assert card["name"] == name
    assert all(value not in (None, "") for value in card.values())


def test_pulling_what_ships_verifies_it(organism: Path) -> None:
    assert pull_model("fly") == organism


def test_an_unknown_card(organism: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'fly'"):
        model_card("flyy")
