"""Architectures that kvprobe knows and refuses, each with the reason."""

from __future__ import annotations

_RECURRENT = (
    "it keeps one recurrent state per layer and no entry per token, so there is nothing to edit in place, to move or "
    "to splice; only a new prefill is exact"
)
_HYBRID = (
    "it mixes attention with recurrent layers, whose state depends on every token before: after an edit, a move or a "
    "splice each layer would have to be run again over the tokens that follow, so that all a moved cache of keys "
    "and values could save is their projection"
)
_PARTIAL = f"{_HYBRID}; kvprobe.composing.hybrid saves just that, and nothing else can be done"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "granitemoehybrid",
            "jamba",
            "minimax",
            "nemotron_h",
            "recurrent_gemma",
            "zamba",
            "zamba2",
        ),
        _HYBRID,
    ),
    "qwen3_next": _PARTIAL,
}
"""Why, by `model_type`; the reason goes on from the name."""
