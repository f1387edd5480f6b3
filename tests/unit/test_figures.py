"""Figures show every model, say why one is missing, and are the same bytes for the same result."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from report_fakes import panel

from kvprobe.errors import StoreError
from kvprobe.figures.panel import Panel
from kvprobe.figures.style import COLORS, save_figure
from kvprobe.probes.mechanism.locality.reading import READING


def texts(figure) -> str:  # type: ignore[no-untyped-def]
    return " ".join(text.get_text() for axes in figure.axes for text in [*axes.texts, axes.title]).replace("\n", " ")


def test_one_column_for_each_model_and_a_reason_for_a_missing_one() -> None:
    figure = READING.draw([panel("first"), Panel("second", note="not applicable: it is at chance")])
    assert len(figure.axes) == 4
    said = texts(figure)
    assert "first" in said
    assert "second" in said
    assert "not applicable: it is at chance" in said
    assert "Qwen3-8B" in said


def test_a_figure_without_any_measured_model_still_tells_why() -> None:
    assert "damaged" in texts(READING.draw([Panel("only", note="failed: its weights are damaged")]))


def test_an_unbounded_interval_leaves_the_axis_as_it_is() -> None:
    bounded = panel()
    effect = replace(bounded.effects["field_only.recovery"], low=-math.inf, high=math.inf)
    unbounded = replace(bounded, effects={**bounded.effects, effect.name: effect})
    low, high = READING.draw([unbounded]).axes[0].get_ylim()
    assert -1 < low < high < 2


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    written = [save_figure(READING.draw([panel()]), tmp_path / name, {"kvprobe": "x/y"}) for name in "ab"]
    for first, second in zip(*written, strict=True):
        assert first.read_bytes() == second.read_bytes()
    with Image.open(written[0][0]) as image:
        assert image.info["kvprobe"] == "x/y"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        save_figure(READING.draw([panel()]), tmp_path / "file" / "figure", {})


def test_colors_differ_in_lightness_or_hue() -> None:
    assert len(set(COLORS.values())) == len(COLORS)
