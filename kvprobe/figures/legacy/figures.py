"""Where figures that are no specs yet find their pieces; goes when the last one is."""

from __future__ import annotations

from kvprobe.figures.bars import draw_effects, effect_key, recovery_by_skeleton
from kvprobe.figures.profiles import draw_profile
from kvprobe.figures.style import COLORS, first_measured, panel_grid, save_figure, styled

__all__ = [
    "COLORS",
    "draw_effects",
    "draw_profile",
    "effect_key",
    "first_measured",
    "panel_grid",
    "recovery_by_skeleton",
    "save_figure",
    "styled",
]
