"""Rows of composed decisions, made by hand."""

from __future__ import annotations

from typing import Any


def decided(side: str, error: float = 0.0, *, margin: float = 5.0, agrees: bool = True) -> dict[str, Any]:
    """The columns of a composed decision whose reference is right by `margin` logits, and which is off by `error`.

    Where it does not agree it gives the other prompt's answer.
    """
    donor = side == "donor"
    return {
        "prompt": side,
        "margin": margin - error,
        "reference_margin": margin,
        "margin_error": error,
        "correct": agrees,
        "agrees": agrees,
        "same_argmax": agrees,
        "answers_donor": donor == agrees,
        "reference_answers_donor": donor,
        "kl": error,
        "js": 0.0,
        "total_variation": 0.0,
        "top_overlap": 1.0,
        "cosine": 1.0,
        "noise_floor": 1e-9,
    }
