"""The support matrix says what the laws show, and nothing else.

After a change that is meant to change it: `PYTHONPATH=tests:tests/models python tests/models/support_laws.py`.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from support_laws import IN_BYTES, LIMIT, REASONS, SCALINGS, measured, move_and_splice, rounded, status, taken_for_plain
from tiny_hybrids import tiny_hybrid
from tiny_models import CONFIGS, tiny
from typer.testing import CliRunner

from kvprobe.cli.models import models_app
from kvprobe.composing.hybrid import HybridChunk
from kvprobe.errors import UnsupportedError
from kvprobe.models.architectures.base import ARCHITECTURES, architecture_of
from kvprobe.models.architectures.hybrid import PARTIAL
from kvprobe.models.architectures.refused import REFUSED
from kvprobe.models.catalogue import model_config, model_names
from kvprobe.models.support import MEANING, OPERATIONS, support_matrix

SHIPPED = {row.architecture: row for row in support_matrix()}
MEASURED = {*ARCHITECTURES.names(), *SCALINGS, *PARTIAL, IN_BYTES}


def test_every_architecture_has_a_row_and_no_row_is_left_over() -> None:
    assert set(SHIPPED) == MEASURED | set(REFUSED)
    assert not set(ARCHITECTURES.names()) & set(REFUSED)
    for row in SHIPPED.values():
        assert len(row.cells) == len(OPERATIONS)
        assert set(row.cells) <= set(MEANING)
        assert row.reason


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_the_shipped_row_is_what_the_laws_show(name: str) -> None:
    assert SHIPPED[name].cells == tuple(measured(name))
    assert SHIPPED[name].reason == REASONS.get(name, SHIPPED[name].reason)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_as_a_whole_is_refused_by_name_and_reason(name: str) -> None:
    with pytest.raises(
        UnsupportedError,
        match=f"'{name}' is refused: its? .*a new prefill is exact|'{name}' is refused: it .*(recurrent)",
    ):
        architecture_of(SimpleNamespace(model_type=name))
    assert set(SHIPPED[name].cells) == ({"refused", "partial"} if name in PARTIAL else {"refused"})


@pytest.mark.parametrize("name", model_names())
def test_every_listed_model_has_an_adapter_or_a_reason(name: str) -> None:
    architecture = model_config(name).architecture
    assert architecture in {*ARCHITECTURES.names(), *REFUSED}, name


@pytest.mark.parametrize("name", sorted(PARTIAL))
def test_what_is_partial_is_moving_alone_and_says_what_it_saves(name: str) -> None:
    row = SHIPPED[name]
    partial = [operation for operation, cell in zip(OPERATIONS, row.cells, strict=True) if cell == "partial"]
    assert partial == ["move and splice"]
    assert re.search(r"saves \d\.\d% of a prefill's weight FLOPs at most", row.reason)


def test_a_part_that_is_not_right_is_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny_hybrid("scans_first")
    monkeypatch.setattr(HybridChunk, "moved_to", lambda self, subject, position: dict(self.layers))
    with pytest.raises(AssertionError, match="move and splice of scans_first is off by"):
        status(subject, "move and splice")


def test_a_law_that_does_not_hold_is_not_written_down_as_support() -> None:
    subject = taken_for_plain(tiny("deepseek_v2", torch.float64))
    assert move_and_splice(subject) > LIMIT
    with pytest.raises(AssertionError, match="move and splice of deepseek_v2 is off by"):
        status(subject, "move and splice")


def test_an_error_that_is_not_of_rounding_is_not_written_down() -> None:
    subject = taken_for_plain(tiny("deepseek_v2", torch.float64))
    with pytest.raises(AssertionError, match="with wider steps"):
        rounded(subject, "move and splice")


def test_windows_latents_and_pair_layouts_are_what_needs_an_adapter() -> None:
    splice = OPERATIONS.index("move and splice")
    needs = {name for name in ARCHITECTURES.names() if SHIPPED[name].cells[splice] == "adapter"}
    assert {"gemma2", "gemma3_text", "mistral", "mixtral", "glm", "deepseek_v2", "deepseek_v3"} <= needs
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "stablelm"}.isdisjoint(needs)
    assert CONFIGS["mixtral"].sliding_window


def test_the_command_prints_every_row_and_every_reason() -> None:
    result = CliRunner().invoke(models_app, ["support"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    for row in SHIPPED.values():
        assert row.architecture in text
    for words in (*OPERATIONS, *MEANING):
        assert words in text
