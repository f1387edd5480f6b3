"""Effects as HTML: estimate, interval, counts and noise floor, with a bar to see them by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvprobe.html.templating import Html, render
from kvprobe.report.tables import interval, short
from kvprobe.stats import Effect

_WIDTH = 140
_EDGE = 5


def effect_html(effect: Effect) -> str:
    """One effect."""
    return effects_html({"": [effect]})


def effect_table(effects: Mapping[str, Sequence[Effect]] | Iterable[Effect], *, only: str = "") -> Html:
    """Effects under each other, of one unit on one scale.

    Args:
        effects: by model, as `RunResult.effects` gives them, or those of one model.
        only: a text that the names shown hold, such as `recovery`.
    """
    by_model = effects if isinstance(effects, Mapping) else {"": list(effects)}
    chosen = {model: [effect for effect in of_model if only in effect.name] for model, of_model in by_model.items()}
    told = [
        f"{f'{short(model)}: ' if model else ''}{effect.name}: {effect}" for model in chosen for effect in chosen[model]
    ]
    return Html(effects_html(chosen), "\n".join(told) or "no effects")


def effects_html(effects: Mapping[str, Sequence[Effect]]) -> str:
    """A table of effects by model, a line for each."""
    every = [effect for of_model in effects.values() for effect in of_model]
    names = dict.fromkeys(effect.name for effect in every)
    lines = [
        {"effect": effect, "model": model, "value": interval(effect), "bar": bar(effect, every)}
        for name in names
        for model, of_model in effects.items()
        for effect in of_model
        if effect.name == name
    ]
    return render("effects", lines=lines, models=any(effects), fractions=any(e.unit == "fraction" for e in every))


def bar(effect: Effect, beside: Iterable[Effect] = ()) -> dict[str, Any]:
    """Where the parts of an effect's bar stand, in pixels; its scale holds all effects `beside` it of the same unit."""
    shown = [effect, *(other for other in beside if other.unit == effect.unit)]
    marks = [0.0, 1.0] if effect.unit == "fraction" else [0.0]
    ends = [value for one in shown for value in (one.low, one.high, one.estimate, -one.noise_floor, one.noise_floor)]
    ends = [value for value in (*ends, *marks) if math.isfinite(value)]
    lowest, highest = min(ends), max(ends)
    stretch = (_WIDTH - 2 * _EDGE) / ((highest - lowest) or 1.0)

    def place(value: float) -> float:
        if math.isinf(value):
            return 0.0 if value < 0 else float(_WIDTH)
        return round(_EDGE + (value - lowest) * stretch, 1)

    low, high = place(effect.low), place(effect.high)
    noise = place(-effect.noise_floor), place(effect.noise_floor)
    return {
        "width": _WIDTH,
        "low": low,
        "span": max(round(high - low, 1), 1.0),
        "estimate": place(effect.estimate),
        "noise_from": noise[0],
        "noise_width": round(noise[1] - noise[0], 1),
        "marks": [place(mark) for mark in marks],
        "open_low": math.isinf(effect.low),
        "open_high": math.isinf(effect.high),
        "is_range": effect.is_range,
        "label": str(effect),
    }
